"""Folders named by a path: hashes them, reads them into the page cache for the engine, and detects later changes."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from .adapter import adapter_content, adapter_files
from .checkpoint import checkpoint_files, read_checkpoint
from .content import ContentHasher, FileNotes, note_files
from .headers import Tensor
from .progress import Progress
from .quiet_threads import Job, Scratch, run_quietly
from .roots import bad_source

__all__ = ["FolderContent", "Watched", "WatchedFolders", "find_changed_file", "folder_content"]

JOB_BYTES: Final = 64 * 1024**2
"""Bytes that one job reads. Cancellation takes effect between two jobs."""
PIECE_BYTES: Final = 4 * 1024**2
MEMORY_SHARE: Final = 2
"""Files larger than the free memory divided by this value are not read ahead: the last files would displace the first
files from the page cache."""


class FolderContent(NamedTuple):
    """What an engine reads in a folder."""

    folder: Path
    """The real path of the folder."""
    notes: FileNotes
    """States of the files, from before their headers were read."""
    tensors: Mapping[str, Tensor]
    whole: frozenset[str]
    """Names in `tensors` that are whole files."""


class Watched(NamedTuple):
    """A folder as it was hashed."""

    notes: FileNotes
    """States of the files that the engine reads."""
    digest: str
    """Digest of the content that they had."""


class WatchedFolders:
    """Folders named by paths, with the states and the content of their files when they were validated.

    Args:
        max_watched: the maximum number of remembered folders.
        hasher: computes digests.
    """

    def __init__(self, max_watched: int, hasher: ContentHasher) -> None:
        self._max_watched = max_watched
        self._hasher = hasher
        self._folders: dict[str, Path] = {}
        self._watched: dict[Path, Watched] = {}

    def __repr__(self) -> str:
        """One line with the count."""
        return f"<WatchedFolders {len(self._folders)}>"

    def find(self, folder: Path) -> Watched | None:
        """Return the recorded state of a folder, or None."""
        return self._watched.get(folder)

    def is_known(self, content: FolderContent) -> bool:
        """Return True if the folder was read before and has not changed since."""
        watched = self._watched.get(content.folder)
        return watched is not None and watched.notes == content.notes

    async def read(self, path: str, content: FolderContent, progress: Progress, *, is_urgent: bool = False) -> str:
        """Hash a folder and read it into the page cache, unless that was done before and it has not changed since.

        Args:
            path: the path that leads to the folder.
            is_urgent: True if a worker waits for the digest before it serves.

        Returns:
            The digest of the content.

        Raises:
            ControlError: `bad_source`: a file cannot be read; `storage`: a file changed meanwhile.
        """
        watched = self._watched.get(content.folder)
        if watched is None or watched.notes != content.notes:
            try:
                digest, read = await self._hasher.digest(
                    content.tensors, content.notes, progress, whole=content.whole, is_urgent=is_urgent
                )
                unread = {tensor.file for tensor in content.tensors.values()} - read
                await _read_ahead({file: content.notes[file] for file in unread}, progress)
            except OSError as error:
                raise bad_source(f"{path} cannot be read: {error.strerror or error}") from error
            watched = Watched(content.notes, digest)
        self._folders.pop(path, None)
        self._folders[path] = content.folder
        self._watched[content.folder] = watched
        while len(self._folders) > self._max_watched:
            del self._folders[next(iter(self._folders))]
            self._watched = {folder: self._watched[folder] for folder in self._folders.values()}
        return watched.digest


def folder_content(folder: Path, check: Callable[[Path], None] | None, *, is_adapter: bool) -> FolderContent:
    """Validate a folder with `check`, and return its content. Blocks.

    Raises:
        ControlError: an error of `check`, or `bad_source`.
        OSError: a file cannot be read.
    """
    files = adapter_files(folder) if is_adapter else checkpoint_files(folder, read_checkpoint(folder))
    notes = note_files(files)
    if check is not None:
        check(folder)
    tensors, whole = adapter_content(folder) if is_adapter else (read_checkpoint(folder), frozenset[str]())
    return FolderContent(folder, notes, tensors, whole)


def find_changed_file(notes: FileNotes, *, is_strict: bool) -> Path | None:
    """Return the first file that is not in the noted state, or None. Blocks.

    Args:
        is_strict: False accepts a change of attributes alone, such as another hard link: the engine has read the file.
    """
    for path, note in notes.items():
        try:
            now = note_files([path])[path]
        except OSError:
            return path
        if now != note and (is_strict or now.content != note.content):
            return path
    return None


async def _read_ahead(notes: FileNotes, progress: Progress) -> None:
    """Read files once, so that the engine then reads them from memory. Requests wait for that read of the engine."""
    total = sum(note.size for note in notes.values())
    if not total or total > _free_memory() // MEMORY_SHARE:
        return
    progress.begin("reading", total)
    await run_quietly(_jobs(notes, progress))


def _jobs(notes: FileNotes, progress: Progress) -> Iterator[Job]:
    for path, note in notes.items():
        for begin in range(0, note.size, JOB_BYTES):
            yield _ReadJob(path, begin, progress)


class _ReadJob:
    def __init__(self, path: Path, begin: int, progress: Progress) -> None:
        self._path = path
        self._begin = begin
        self._progress = progress

    def __call__(self, scratch: Scratch) -> None:
        piece = scratch.get(PIECE_BYTES).data
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._begin)
            left = JOB_BYTES
            while left > 0 and (count := file.readinto(piece)):
                left -= count
                self._progress.add(count)


def _free_memory() -> int:
    """Return the bytes that programs can allocate without swapping, or 0 if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
