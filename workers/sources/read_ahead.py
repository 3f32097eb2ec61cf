"""Folders named by a path: detects changes of their files, and reads checkpoints into the page cache for the engine."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from .checkpoint import CONFIG, INDEX
from .headers import Tensor
from .progress import Progress
from .quiet_threads import Job, Scratch, run_quietly

__all__ = ["FileNotes", "WatchedFolders", "checkpoint_files", "note_files", "read_ahead"]

FileNotes = Mapping[Path, tuple[int, int]]
"""Size in bytes and modification time in ns of each file that the engine reads."""

JOB_BYTES: Final = 64 * 1024**2
"""Bytes that one job reads. Cancellation takes effect between two jobs."""
PIECE_BYTES: Final = 4 * 1024**2
MEMORY_SHARE: Final = 2
"""A checkpoint larger than the free memory divided by this value is not read ahead: its last files would displace its
first files from the page cache."""


class WatchedFolders:
    """Folders named by paths, with the sizes and times of their files when they were checked.

    Args:
        max_watched: the maximum number of remembered folders.
    """

    def __init__(self, max_watched: int) -> None:
        self._max_watched = max_watched
        self._folders: dict[str, Path] = {}
        self._notes: dict[Path, FileNotes] = {}

    def __repr__(self) -> str:
        """One line with the count."""
        return f"<WatchedFolders {len(self._folders)}>"

    def is_noted(self, folder: Path, notes: FileNotes) -> bool:
        """Return True if the files have the sizes and times that were recorded before."""
        return self._notes.get(folder) == notes

    def add(self, path: str, folder: Path, notes: FileNotes) -> None:
        """Record the files of `folder`, the real path that `path` resolves to."""
        self._folders.pop(path, None)
        self._folders[path] = folder
        self._notes[folder] = notes
        while len(self._folders) > self._max_watched:
            del self._folders[next(iter(self._folders))]
            self._notes = {folder: self._notes[folder] for folder in self._folders.values()}

    def is_changed(self, folder: Path) -> bool:
        """Return True if files of a folder differ from their recorded sizes and times. Blocks."""
        try:
            return any(_note(path) != noted for path, noted in self._notes.get(folder, {}).items())
        except OSError:
            return True


def _note(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def checkpoint_files(folder: Path, tensors: Mapping[str, Tensor]) -> set[Path]:
    """Return the files of a checkpoint that an engine reads. Blocks."""
    return {tensor.file for tensor in tensors.values()} | {
        path for name in (INDEX, CONFIG) if (path := folder / name).exists()
    }


def note_files(files: Iterable[Path]) -> FileNotes:
    """Return the current sizes and times of files. Blocks.

    Raises:
        OSError: a file does not exist any more.
    """
    return {path: _note(path) for path in sorted(files)}


async def read_ahead(notes: FileNotes, progress: Progress) -> None:
    """Read files once, so that the engine then reads them from memory. Requests wait for that read of the engine.

    Raises:
        OSError: a file cannot be read.
    """
    total = sum(size for size, _ in notes.values())
    if total > _free_memory() // MEMORY_SHARE:
        return
    progress.begin("reading", total)
    await run_quietly(_jobs(notes, progress))


def _jobs(notes: FileNotes, progress: Progress) -> Iterator[Job]:
    for path, (size, _) in notes.items():
        for begin in range(0, size, JOB_BYTES):
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
