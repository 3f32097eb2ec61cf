"""Folders that a path names: watched for changes; checkpoints are read ahead into memory for the engine."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from .checkpoint import CONFIG, INDEX
from .headers import Tensor
from .progress import Progress
from .quiet_threads import Job, Scratch, run_quietly

__all__ = ["FileNotes", "WatchedFolders", "checkpoint_files", "note_files", "read_ahead"]

FileNotes = Mapping[Path, tuple[int, int]]
"""Of each file that counts: its size and time of change (ns)."""

JOB_BYTES: Final = 64 * 1024**2
"""Read without a look at whether it is still wanted."""
PIECE_BYTES: Final = 4 * 1024**2
MEMORY_SHARE: Final = 2
"""A checkpoint that is larger than one such part of the free memory is not read ahead: it would push out itself."""


class WatchedFolders:
    """Folders that paths named, with what their files were when they were checked.

    Args:
        max_watched: how many are remembered.
    """

    def __init__(self, max_watched: int) -> None:
        self._max_watched = max_watched
        self._folders: dict[str, Path] = {}
        self._notes: dict[Path, FileNotes] = {}

    def __repr__(self) -> str:
        """One line with the count."""
        return f"<WatchedFolders {len(self._folders)}>"

    def is_noted(self, folder: Path, notes: FileNotes) -> bool:
        """Return True if the files are as they were before."""
        return self._notes.get(folder) == notes

    def add(self, path: str, folder: Path, notes: FileNotes) -> None:
        """Note the files of the real `folder` that `path` names."""
        self._folders.pop(path, None)
        self._folders[path] = folder
        self._notes[folder] = notes
        while len(self._folders) > self._max_watched:
            del self._folders[next(iter(self._folders))]
            self._notes = {folder: self._notes[folder] for folder in self._folders.values()}

    def is_changed(self, folder: Path) -> bool:
        """Compare the files of a folder with what was noted of it, if anything was. Blocks."""
        try:
            return any(_note(path) != noted for path, noted in self._notes.get(folder, {}).items())
        except OSError:
            return True


def _note(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def checkpoint_files(folder: Path, tensors: Mapping[str, Tensor]) -> set[Path]:
    """Name the files that an engine reads of a checkpoint. Blocks."""
    return {tensor.file for tensor in tensors.values()} | {
        path for name in (INDEX, CONFIG) if (path := folder / name).exists()
    }


def note_files(files: Iterable[Path]) -> FileNotes:
    """Note what files are like now. Blocks.

    Raises:
        OSError: one is not there any more.
    """
    return {path: _note(path) for path in sorted(files)}


async def read_ahead(notes: FileNotes, progress: Progress) -> None:
    """Read files once, so that the engine's reading of them, for which requests wait, is from memory.

    Raises:
        OSError: one cannot be read.
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
    """Return the bytes that programs could have without swapping; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
