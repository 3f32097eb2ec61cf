"""Digests of weights: SHA-256 of each tensor, computed once on a machine for each state of a file.

The read of the hash also brings the files into the page cache, so that the engine then reads them from memory.
"""

import asyncio
import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...schemas.errors import ControlCode, ControlError
from ...schemas.manifest import tensors_digest
from .headers import Tensor
from .locks import LockWatch, try_lock
from .progress import Progress
from .quiet_threads import Job, Scratch, run_quietly
from .roots import bad_source, open_regular
from .stamps import boot_id

__all__ = ["ContentHasher", "FileNote", "FileNotes", "note_files", "whole_file"]

PIECE_BYTES: Final = 4 * 1024**2
SETTLED_NS: Final = 2_000_000_000
"""Age in ns from which a file's digests are kept. A younger file may change again within the resolution of its time
stamps, and then look unchanged."""
MAX_KEPT: Final = 1024
"""Files whose digests a machine keeps; a large checkpoint has a few hundred. The oldest are deleted."""
POLL_S: Final = 0.1
"""Seconds between two tries to get the lock of the machine."""
CORES_FOR_ONE: Final = 4
MAX_THREADS: Final = 8
"""One thread for each four cores hashes, between two and eight: SHA-256 takes about a second for a GB, and a file is
read at ten times that speed. The threads have the lowest priority."""


class FileNote(NamedTuple):
    """Identifies one state of a file on this machine."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    """Time of the last change of content or attributes, which programs cannot set."""

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileNote":
        """Return the note of a file's status."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def content(self) -> tuple[int, ...]:
        """The part that does not change if only attributes change, for example by a new hard link."""
        return self[:4]


FileNotes = Mapping[Path, FileNote]
"""The state of each file that the engine reads."""


def note_files(files: Iterable[Path]) -> dict[Path, FileNote]:
    """Return the current states of files, each opened anew: only that makes NFS compare with the server. Blocks.

    Raises:
        OSError: a file does not exist any more.
    """
    notes = {}
    for path in sorted(files):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            notes[path] = FileNote.of(os.fstat(fd))
        finally:
            os.close(fd)
    return notes


def whole_file(path: Path) -> Tensor:
    """Return a whole file as if it were one tensor, for files without tensors. Blocks.

    Raises:
        OSError: the file does not exist any more.
    """
    return Tensor("U8", (path.stat().st_size,), path)


class ContentHasher:
    """Computes digests of checkpoints and adapters.

    Args:
        folder: for the digests that this machine keeps; created when needed. If it cannot be written, nothing is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        """One line with the folder."""
        return f"<ContentHasher {self._folder}>"

    async def digest(
        self,
        tensors: Mapping[str, Tensor],
        notes: FileNotes,
        progress: Progress,
        *,
        whole: frozenset[str],
        is_urgent: bool = False,
    ) -> tuple[str, frozenset[Path]]:
        """Return the digest of these tensors, and the files that were read for it.

        Args:
            tensors: all tensors by name.
            notes: states of the files from before the headers were read.
            whole: names in `tensors` that are whole files.
            is_urgent: True if a worker waits for the digest before it serves.

        Raises:
            ControlError: `bad_source`: a file is too short; `storage`: a file changed meanwhile.
            OSError: a file cannot be read.
        """
        by_file: dict[Path, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            by_file.setdefault(tensor.file, {})[name] = tensor
        found = await asyncio.to_thread(self._kept, by_file, notes)
        missing = by_file.keys() - found.keys()
        if missing:
            async with self._locked(progress):
                # Another process of this machine may have hashed the files while this one waited for the lock.
                found |= await asyncio.to_thread(self._kept, {path: by_file[path] for path in missing}, notes)
                missing = by_file.keys() - found.keys()
                files = {path: by_file[path] for path in sorted(missing)}
                found |= await self._hash(files, notes, progress, is_urgent=is_urgent)
        return await asyncio.to_thread(_combine, tensors, found, whole), frozenset(missing)

    async def _hash(
        self,
        by_file: Mapping[Path, Mapping[str, Tensor]],
        notes: FileNotes,
        progress: Progress,
        *,
        is_urgent: bool,
    ) -> dict[Path, dict[str, str]]:
        began_ns = time.time_ns()
        found: dict[Path, dict[str, str]] = {path: {} for path in by_file}
        progress.begin("reading", sum(tensor.size for tensors in by_file.values() for tensor in tensors.values()))
        jobs: list[Job] = [
            _HashJob(name, tensor, found[path], progress)
            for path, tensors in by_file.items()
            for name, tensor in tensors.items()
        ]
        await run_quietly(jobs, num_threads=_num_threads(), is_urgent=is_urgent)
        after = await asyncio.to_thread(note_files, by_file)
        for path in by_file:
            if after[path].content != notes[path].content:
                raise ControlError(ControlCode.STORAGE, f"{path} changed while it was hashed: stage its source again")
        await asyncio.to_thread(self._keep, found, notes, after, began_ns)
        return found

    @contextlib.asynccontextmanager
    async def _locked(self, progress: Progress) -> AsyncIterator[None]:
        """Hold the lock of this machine, so that each file is hashed once. Go on without it if its owner stalls."""
        path = self._folder / f".{boot_id()}.lock"
        fd = watch = None
        with contextlib.suppress(OSError, ControlError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while (fd := try_lock(path, is_exclusive=True)) is None:
                if watch is None:
                    watch = LockWatch(path)
                    progress.begin("waiting")
                watch.check()
                await asyncio.sleep(POLL_S)
        with contextlib.ExitStack() as stack:
            if fd is not None:
                held = fd
                stack.callback(os.close, held)
                progress.on_move = lambda: os.utime(held)
            yield
            progress.on_move = None

    def _kept(self, by_file: Mapping[Path, Mapping[str, Tensor]], notes: FileNotes) -> dict[Path, dict[str, str]]:
        """Return the kept digests of files in the noted states."""
        found = {}
        for path, tensors in by_file.items():
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                digests = msgspec.json.decode(self._file(notes[path]).read_bytes(), type=dict[str, str])
                if digests.keys() == tensors.keys():
                    found[path] = digests
        return found

    def _keep(self, found: Mapping[Path, dict[str, str]], notes: FileNotes, after: FileNotes, began_ns: int) -> None:
        for path, digests in found.items():
            changed_ns = max(notes[path].modified_ns, notes[path].changed_ns)
            if notes[path] == after[path] and changed_ns + SETTLED_NS <= began_ns:
                with contextlib.suppress(OSError):
                    partial = self._folder / f".{uuid.uuid4().hex}"
                    partial.write_bytes(msgspec.json.encode(digests))
                    partial.rename(self._file(notes[path]))
        with contextlib.suppress(OSError):
            kept = [path for path in self._folder.iterdir() if path.suffix == ".json"]
            for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
                path.unlink(missing_ok=True)

    def _file(self, note: FileNote) -> Path:
        """Return the file of the digests of a state. The boot id tells machines that share the folder apart."""
        return self._folder / f"{hashlib.sha256(f'{boot_id()} {note}'.encode()).hexdigest()}.json"


class _HashJob:
    """Hashes one tensor of a file."""

    def __init__(self, name: str, tensor: Tensor, found: dict[str, str], progress: Progress) -> None:
        self._name = name
        self._tensor = tensor
        self._found = found
        self._progress = progress

    def __call__(self, scratch: Scratch) -> None:
        sha, size, offset = hashlib.sha256(), self._tensor.size, self._tensor.begin
        fd = open_regular(self._tensor.file)
        try:
            while size > 0:
                piece = scratch.get(PIECE_BYTES)[: min(PIECE_BYTES, size)].data
                count = os.preadv(fd, [piece], offset)
                if not count:
                    raise bad_source(self._tensor.file, f"ends at byte {offset}; expected: {size} more")
                sha.update(piece[:count])
                size, offset = size - count, offset + count
                self._progress.add(count)
        finally:
            os.close(fd)
        self._found[self._name] = sha.hexdigest()


def _combine(tensors: Mapping[str, Tensor], found: Mapping[Path, Mapping[str, str]], whole: frozenset[str]) -> str:
    digests = {name: found[tensor.file][name] for name, tensor in tensors.items()}
    return tensors_digest(
        ((name, tensor.dtype, tensor.shape, digests[name]) for name, tensor in tensors.items() if name not in whole),
        {name: digests[name] for name in whole},
    )


def _num_threads() -> int:
    return max(2, min(MAX_THREADS, len(os.sched_getaffinity(0)) // CORES_FOR_ONE))
