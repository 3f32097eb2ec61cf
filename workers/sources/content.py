"""Digests of weights: SHA-256 of each tensor, computed once on a machine for each state of a file.

The read of the hash also brings the files into the page cache, so that the engine then reads them from memory. A worker
reads only folders whose real path, and the real path of each file in them, is below an allowed root.
"""

import asyncio
import contextlib
import hashlib
import os
import stat
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...bus.objects import safetensors_header
from ...schemas.errors import ControlCode, ControlError, bad_source, storage_failure
from ...schemas.manifest import content_bytes, tensors_digest
from .store import POLL_S, LockWatch, boot_id, try_lock
from .threads import Job, Progress, Scratch, run_quietly

MAX_ENTRIES: Final = 16_384
"""Maximum number of files and folders in a source: far more than a checkpoint has, and few enough to check quickly."""
_MAX_SHOWN: Final = 8
"""Maximum number of roots in an error message."""
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes that the tensors of an adapter may have."""
PIECE_BYTES: Final = 4 * 1024**2
"""Bytes read at a time."""
SETTLED_NS: Final = 2_000_000_000
"""Age in ns from which a file's digests are kept. A younger file may change again within the resolution of its time
stamps, and then look unchanged."""
MAX_KEPT: Final = 1024
"""Files whose digests a machine keeps; a large checkpoint has a few hundred. The oldest are deleted."""
CORES_FOR_ONE: Final = 4
MAX_THREADS: Final = 8
"""One thread for each four cores hashes, between two and eight: SHA-256 takes about a second for a GB, and a file is
read at ten times that speed. The threads have the lowest priority."""


def resolve_allowed(path: str, roots: Sequence[Path]) -> Path:
    """Return the real path of the folder `path`, with symlinks and `..` resolved. Blocks.

    Args:
        path: an absolute path.
        roots: the allowed folders, which may be symlinks themselves. If there are none, no path is allowed.

    Raises:
        ControlError: `path_refused`: the real path of the folder, or of a file in it, is below no root; `bad_source`:
            `path` is no folder, or contains an entry that is neither a regular file nor a folder.
    """
    if not path.startswith("/") or "\0" in path:
        raise ControlError(ControlCode.PATH_REFUSED, f"{path[:1000]!r} is refused; allowed: an absolute path")
    # Beyond the first directory, clients must not learn what exists outside the roots.
    if not os.path.lexists("/" + path.lstrip("/").partition("/")[0]):
        raise bad_source(f"{path[:1000]} does not exist on the worker's machine")
    folder = Path(os.path.realpath(path))
    _check_allowed(folder, roots, path)
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise bad_source(f"{path} is not a directory")
        _check_entries(folder, path, roots)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            problem = "does not exist on the worker's machine"
        raise bad_source(f"{_describe_entry(error.filename, folder, path)} {problem}") from error
    return folder


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Raise `bad_source` with the name of what is read for each `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise bad_source(f"{what} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def open_file(path: Path, flags: int = os.O_NONBLOCK, *mode: int) -> Iterator[int]:
    """Open a file and yield its descriptor. By default, open it for reading, without waiting for a named pipe."""
    fd = os.open(path, flags | os.O_CLOEXEC, *mode)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor. Opening a named pipe does not block.

    Raises:
        ControlError: `bad_source`: the file cannot be opened or is no regular file.
    """
    with contextlib.ExitStack() as stack:
        with reading(path):
            fd = stack.enter_context(open_file(path))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise bad_source(f"{path} is no regular file")
        yield fd


def _check_allowed(real: Path, roots: Sequence[Path], shown: str) -> None:
    """Check that `real` is below a root. The error names `shown`, because clients must not learn symlink targets.

    Raises:
        ControlError: `path_refused`.
    """
    if any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        return
    allowed = ", ".join(map(str, roots[:_MAX_SHOWN])) or "none"
    raise ControlError(
        ControlCode.PATH_REFUSED,
        f"{shown[:1000]} is outside the worker's directories of weights, or a symlink leads out of them; allowed: "
        f"{allowed}; for another, start the worker with --weight-root DIR",
    )


def _check_entries(folder: Path, path: str, roots: Sequence[Path]) -> None:
    """Check all entries of the folder, because an engine follows symlinks and reads every file.

    Args:
        path: the name of the folder in errors.
    """

    def fail(error: OSError) -> None:
        raise error

    entries = 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise bad_source(f"{path} has more than {MAX_ENTRIES} files")
        for entry in (Path(parent, name) for name in folders + files):
            shown = _describe_entry(entry, folder, path)
            if entry.is_symlink():
                _check_allowed(Path(os.path.realpath(entry)), roots, shown)
            mode = entry.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise bad_source(f"{shown} is no regular file")


def _describe_entry(entry: str | Path | None, folder: Path, path: str) -> str:
    """Convert the path of an entry of the real `folder` to a path below `path`."""
    if entry is None or not Path(entry).is_relative_to(folder):
        return path
    return str(Path(path, Path(entry).relative_to(folder)))


class Tensor(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: str
    """The dtype as in safetensors files: BF16, F32 ..."""
    shape: tuple[int, ...]
    file: Path
    """The file that contains the tensor."""
    begin: int = 0
    """The byte of the file at which the content begins."""

    @property
    def size(self) -> int:
        """Size of the content in bytes."""
        return content_bytes(self.dtype, self.shape)

    def __str__(self) -> str:
        """Dtype and shape, for error messages."""
        return f"{self.dtype}{list(self.shape)}"


def read_header(path: Path) -> dict[str, Tensor]:
    """Read names, dtypes and shapes of the tensors in a safetensors file, and check that the file is complete. Blocks.

    Raises:
        ControlError: `bad_source`: the file cannot be read, is truncated, or is no safetensors file.
    """
    try:
        with open_regular(path) as fd, reading(path):
            tensors = safetensors_header.read_header(fd)
    except safetensors_header.BadSafetensors as error:
        raise bad_source(path, error) from error
    return {name: Tensor(stored.dtype, stored.shape, path, stored.begin) for name, stored in tensors.items()}


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
        with open_file(path) as fd:
            notes[path] = FileNote.of(os.fstat(fd))
    return notes


def whole_file(path: Path) -> Tensor:
    """Return a whole file as if it were one tensor, for files without tensors. Blocks.

    Raises:
        OSError: the file does not exist any more.
    """
    return Tensor("U8", (path.stat().st_size,), path)


class FolderContent(NamedTuple):
    """What an engine reads in a folder."""

    folder: Path
    """The real path of the folder."""
    notes: FileNotes
    """States of the files, from before their headers were read."""
    tensors: Mapping[str, Tensor]
    whole: frozenset[str]
    """Names in `tensors` that are whole files."""


class ContentHasher:
    """Computes digests of checkpoints and adapters.

    Args:
        folder: for the digests that this machine keeps; created when needed. If it cannot be written, nothing is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def digest(
        self, content: FolderContent, progress: Progress, *, is_urgent: bool = False
    ) -> tuple[str, frozenset[Path]]:
        """Return the digest of a folder, and the files that were read for it.

        Args:
            is_urgent: True if a worker waits for the digest before it serves.

        Raises:
            ControlError: `bad_source`: a file is too short; `storage`: a file changed meanwhile.
            OSError: a file cannot be read.
        """
        notes = content.notes
        by_file: dict[Path, dict[str, Tensor]] = {}
        for name, tensor in content.tensors.items():
            by_file.setdefault(tensor.file, {})[name] = tensor
        found = await asyncio.to_thread(self._find_kept, by_file, notes)
        missing = by_file.keys() - found.keys()
        if missing:
            async with self._lock(progress):
                # Another process of this machine may have hashed the files while this one waited for the lock.
                found |= await asyncio.to_thread(self._find_kept, {path: by_file[path] for path in missing}, notes)
                missing = by_file.keys() - found.keys()
                files = {path: by_file[path] for path in sorted(missing)}
                found |= await self._hash(files, notes, progress, is_urgent)
        return await asyncio.to_thread(_combine, content, found), frozenset(missing)

    async def _hash(
        self, by_file: Mapping[Path, Mapping[str, Tensor]], notes: FileNotes, progress: Progress, is_urgent: bool
    ) -> dict[Path, dict[str, str]]:
        began_ns = time.time_ns()
        found: dict[Path, dict[str, str]] = {path: {} for path in by_file}
        progress.begin("reading", sum(tensor.size for tensors in by_file.values() for tensor in tensors.values()))
        jobs: list[Job] = [
            partial(_hash_tensor, name, tensor, found[path], progress)
            for path, tensors in by_file.items()
            for name, tensor in tensors.items()
        ]
        num_threads = max(2, min(MAX_THREADS, len(os.sched_getaffinity(0)) // CORES_FOR_ONE))
        await run_quietly(jobs, num_threads=num_threads, is_urgent=is_urgent)
        after = await asyncio.to_thread(note_files, by_file)
        for path in by_file:
            if after[path].content != notes[path].content:
                raise storage_failure(f"{path} changed while it was hashed: stage its source again")
        await asyncio.to_thread(self._keep, found, notes, after, began_ns)
        return found

    @contextlib.asynccontextmanager
    async def _lock(self, progress: Progress) -> AsyncIterator[None]:
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

    def _find_kept(self, by_file: Mapping[Path, Mapping[str, Tensor]], notes: FileNotes) -> dict[Path, dict[str, str]]:
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
            kept = [path for path in self._folder.iterdir() if path.suffix != ".lock"]
            for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
                path.unlink(missing_ok=True)

    def _file(self, note: FileNote) -> Path:
        """Return the file of the digests of a state. The boot id tells machines that share the folder apart."""
        return self._folder / f"{hashlib.sha256(f'{boot_id()} {note}'.encode()).hexdigest()}.json"


def hash_range(path: Path, begin: int, size: int, on_bytes: Callable[[int], None], scratch: Scratch) -> str:
    """Return the SHA-256 of some bytes of a file. Blocks.

    Args:
        on_bytes: called with the number of bytes just read. They are few, so that waiting processes see progress even
            if this process gets little CPU.

    Raises:
        ControlError: `bad_source`: the file cannot be read or is too short.
    """
    sha, end = hashlib.sha256(), begin + size
    with open_regular(path) as fd:
        while begin < end:
            piece = scratch.get(PIECE_BYTES)[: min(PIECE_BYTES, end - begin)].data
            count = os.preadv(fd, [piece], begin)
            if not count:
                raise bad_source(path, f"ends at byte {begin}; expected: {end - begin} more")
            sha.update(piece[:count])
            begin += count
            on_bytes(count)
    return sha.hexdigest()


def _hash_tensor(name: str, tensor: Tensor, found: dict[str, str], progress: Progress, scratch: Scratch) -> None:
    found[name] = hash_range(tensor.file, tensor.begin, tensor.size, progress.add, scratch)


def _combine(content: FolderContent, found: Mapping[Path, Mapping[str, str]]) -> str:
    tensors, whole = content.tensors, content.whole
    digests = {name: found[tensor.file][name] for name, tensor in tensors.items()}
    return tensors_digest(
        ((name, tensor.dtype, tensor.shape, digests[name]) for name, tensor in tensors.items() if name not in whole),
        {name: digests[name] for name in whole},
    )
