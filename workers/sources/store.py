"""Complete, immutable folders, each named by the digest of its content, that the workers of a machine share.

Two entries accompany the folder `<digest>`. A process locks `.<digest>.lock`: exclusively while it builds or deletes
the folder, and shared while it uses the folder. The folder is built in `.<digest>.partial` and gets its name when it is
complete. So a killed builder leaves only a partial folder, which the next builder of that digest continues. The lock
file of a complete folder records the boot of the last verification, the stamp of the files then, and the model.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self

from ...schemas.errors import FREE_SPACE, storage_failure

logger = logging.getLogger(__name__)


BUILDER: Final = "builder "
"""The text in a lock file before the process id of the builder."""
STALLED_S: Final = 60.0
"""Seconds without progress after which a builder counts as stalled. A builder touches the lock file whenever it
fetches or hashes bytes. The limit allows for a disk or an object store that does not respond for a while."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""The error numbers of file systems without locks."""
SHARED: Final = "shared.weights"
"""The folder that all workers of a fleet on a machine share. Worker names have no dot, so no worker has this name."""
LEFT_S: Final = 24 * 3600.0
"""Seconds without use after which partial folders, and folders of models of other workers, are deleted."""
MAX_MARK_BYTES: Final = 4096
"""Bytes read of a lock file: the ids have about 100 bytes, and a model's name fits into the rest."""
RETIRING: Final = ".retiring.lock"
"""A process locks this file briefly while it removes a damaged folder."""
POLL_S: Final = 0.1
"""Seconds between two tries to get a lock that another process holds. A wait in a thread could not be cancelled."""


def can_lock(folder: Path) -> bool:
    """Return True if the file system of `folder` supports locks. Blocks briefly.

    Raises:
        OSError: no file can be created there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _NO_LOCKS
    return True


def try_lock(path: Path, *, is_exclusive: bool) -> int | None:
    """Lock a file without waiting, and create it if it is missing. Closing the returned descriptor releases the lock.

    Return None if another process holds the lock. On a file system without locks the file is not locked, so only one
    process may use it.

    Raises:
        OSError: the file cannot be created.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        # A process that deletes the file holds its lock. A lock on the deleted file would exclude no other process.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


class LockWatch:
    """Checks that the process that holds a lock makes progress: that process touches the lock file.

    Args:
        path: the lock file.
        clock: returns monotonic seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self._since = clock()

    def check(self) -> None:
        """Check when the lock file was touched. Blocks briefly.

        Raises:
            ControlError: `storage`: no process has touched the file for `STALLED_S`. The message names the process.
        """
        try:
            stat = self._path.stat()
            seen, content = (stat.st_ino, stat.st_mtime_ns), self._path.read_bytes()[:64].decode(errors="replace")
        except FileNotFoundError:  # deleted under its lock
            seen, content = None, ""
        now = self._clock()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now >= self._since + STALLED_S:
            pid = content.removeprefix(BUILDER) if content.startswith(BUILDER) else "of unknown id"
            raise storage_failure(
                f"{self._path} is locked by the process {pid}, which has made no progress for {STALLED_S:g} s"
            )


def store_root(cache: Path, worker: str) -> Path:
    """Return the folder that the workers of a fleet share. On a file system without locks, return this worker's own.

    Blocks briefly. If the folder is not writable, this call raises nothing, and the first staging fails.
    """
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if not can_lock(cache):
            return cache / f"{worker}.weights"
    return cache / SHARED


def files_stamp(folder: Path) -> str:
    """Return a digest of the sizes and times of all files below a folder. Blocks."""
    sha = hashlib.sha256()
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(parent, name) for name in sorted(names)):
            with contextlib.suppress(FileNotFoundError):  # a file deleted meanwhile is not in the stamp
                stat = path.lstat()
                times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
                sha.update(f"{path.relative_to(folder)}\0{stat.st_size} {times}\n".encode())
    return sha.hexdigest()


def boot_id() -> str:
    """Return the id of the current boot of the machine. A crash may lose data that was not on disk yet."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class _Mark(NamedTuple):
    """The content of the lock file of a complete folder."""

    boot: str
    """The boot id under which the content was built, or verified last."""
    files: str
    """The stamp of the files at that time."""
    model: str
    """The model of the workers that built or verified the folder."""

    @classmethod
    def read(cls, fd: int) -> Self:
        lines = os.pread(fd, MAX_MARK_BYTES, 0).decode(errors="replace").split("\n")
        return cls(*lines) if len(lines) == len(cls._fields) else cls("", "", "")

    def write(self, fd: int) -> None:
        os.ftruncate(fd, os.pwrite(fd, "\n".join(self).encode(), 0))


class Hold:
    """A complete folder that is not deleted until the hold is released."""

    def __init__(self, store: "FolderStore", digest: str, fd: int) -> None:
        self.digest = digest
        self.folder = store.folder(digest)
        self._store = store
        self._fd: int | None = fd
        store.held[digest] += 1

    @property
    def is_of_this_boot(self) -> bool:
        """True if the folder was verified since the machine booted. A crash may lose data that is not on disk yet."""
        return self._fd is not None and _Mark.read(self._fd).boot == boot_id()

    def is_unchanged(self) -> bool:
        """Return True if sizes and times of the files are those of the last verification. Blocks."""
        return self._fd is not None and _Mark.read(self._fd).files == files_stamp(self.folder)

    def confirm(self, files: str) -> None:
        """Record that the content was verified, for the other processes of this machine.

        Args:
            files: the stamp of the files, computed before the verification.
        """
        if self._fd is not None:
            _Mark(boot_id(), files, self._store.model).write(self._fd)

    def retire(self) -> None:
        """Remove a damaged folder, even if other processes hold it, and release the hold. Blocks.

        Afterwards the folder can be built again. If another process has removed the folder, or is removing it now, only
        the hold is released.
        """
        store, digest = self._store, self.digest
        with self:
            # Other processes hold the lock too and find the damage. A mutex lets only one of them check and remove.
            mutex = None if self._fd is None else try_lock(store.root / RETIRING, is_exclusive=True)
            if self._fd is None or mutex is None:
                return
            damaged = store.root / f".{uuid.uuid4().hex}.partial"
            try:
                if not os.path.samestat(os.fstat(self._fd), store.lock_file(digest).stat()):
                    return
                # Remove the lock file first: if this process is killed here, the folder counts as not verified.
                store.lock_file(digest).unlink()
                self.folder.rename(damaged)
            except FileNotFoundError:  # another process removed the folder first
                return
            finally:
                os.close(mutex)
        shutil.rmtree(damaged, ignore_errors=True)
        logger.info("folders.retired folder=%s", self.folder)

    def __enter__(self) -> Self:
        """Return this hold, which the end of the block releases."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Release the hold."""
        self.release()

    def release(self) -> None:
        """Allow the folder to be deleted. A second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._store.held[self.digest] -= 1


class PartialFolder:
    """A folder that only this process builds. End the build with `complete` or `leave`."""

    def __init__(self, store: "FolderStore", digest: str, fd: int) -> None:
        self.digest = digest
        self.path = store.partial(digest)
        """The folder for all files of the build. It may contain files of an earlier try."""
        self._store = store
        self._fd = fd

    def make_room(self, needed: int) -> None:
        """Make room for `needed` bytes below `path`; delete unused folders if necessary. Blocks.

        Raises:
            ControlError: `storage`. The message names the used, the needed and the allowed bytes.
        """
        self._store.make_room(needed, self.digest)

    def reuse(self, name: str) -> Path:
        """Return the folder `name` below `path`, with the files of an unused old folder if there is one. Blocks.

        Existing files are overwritten faster than new files are created. Their old content is meaningless.
        """
        folder = self.path / name
        if not folder.exists() and not self._store.move_old(self.digest, folder):
            folder.mkdir()
        return folder

    def complete(self, folder: Path, files: str) -> None:
        """Rename `folder`, which is below `path`, to the complete folder, and release the lock.

        Args:
            files: the stamp of the folder's files.
        """
        _Mark(boot_id(), files, self._store.model).write(self._fd)
        folder.rename(self._store.folder(self.digest))
        _note_use(self._fd)
        os.close(self._fd)

    def touch(self) -> None:
        """Show the waiting processes that this build makes progress."""
        _note_use(self._fd)

    def leave(self, *, discard: bool) -> None:
        """End the build without a result, and release the lock.

        Args:
            discard: delete the files, which blocks. Otherwise the next try continues with them.
        """
        if discard:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


class FolderStore:
    """The folders below `root`.

    Args:
        root: folder that is created when needed, readable only for this user.
        model: model of the workers that use this store. Workers of other models may have folders there, too.
        max_bytes: limit for all files below the parent of `root`; None if only the disk is the limit.
        kept: number of complete folders of the model that stay. Older folders are deleted when no process holds them.
    """

    def __init__(self, root: Path, *, model: str, max_bytes: int | None, kept: int) -> None:
        self.root = root
        self.model = model
        self.held: Counter[str] = Counter()
        """The number of holds of this process for each digest. File systems without locks need it."""
        self._max_bytes = max_bytes
        self._kept = kept

    def folder(self, digest: str) -> Path:
        """Return the path of the complete folder of a digest."""
        return self.root / digest

    def partial(self, digest: str) -> Path:
        """Return the path of the folder in which the digest is built."""
        return self.root / f".{digest}.partial"

    def digests(self) -> frozenset[str]:
        """Return the digests of the complete folders. Blocks."""
        return frozenset(name for name in self._names() if not name.startswith("."))

    def hold(self, digest: str) -> Hold | None:
        """Hold a complete folder. Return None if there is none, or if it is just being deleted. Blocks briefly."""
        if not self.folder(digest).is_dir():
            return None
        fd = self._lock(digest, is_exclusive=False)
        if fd is None:
            return None
        if not self.folder(digest).is_dir():
            os.close(fd)
            return None
        _note_use(fd)
        return Hold(self, digest, fd)

    async def open(self, digest: str, on_wait: Callable[[], None]) -> Hold | PartialFolder:
        """Hold the complete folder, or begin to build it. If another process builds it, wait for that process.

        Args:
            on_wait: called once if this call has to wait.

        Raises:
            ControlError: `storage`: the other process makes no progress.
            OSError: the root cannot be created or written.
        """
        watch: LockWatch | None = None
        while True:
            for folder in (self.root.parent, self.root):  # `mkdir` applies the mode only to the last folder it creates
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (hold := self.hold(digest)) is not None:
                return hold
            if (fd := self._lock(digest, is_exclusive=True)) is not None:
                with contextlib.ExitStack() as unless_begun:
                    # Free the lock also if the disk is full: a remaining lock would block this process itself.
                    unless_begun.callback(os.close, fd)
                    if not self.folder(digest).is_dir():
                        self.partial(digest).mkdir(exist_ok=True, mode=0o700)
                        os.truncate(fd, os.pwrite(fd, f"{BUILDER}{os.getpid()}".encode(), 0))
                        unless_begun.pop_all()
                        return PartialFolder(self, digest, fd)
            elif (fd := self._lock(digest, is_exclusive=False)) is not None:
                with Hold(self, digest, fd) as hold:
                    if not hold.folder.is_dir():
                        # Somebody deleted a folder in use. Its users keep the old lock file, which excludes no builder.
                        hold.retire()
            if watch is None:
                watch = LockWatch(self.lock_file(digest))
                on_wait()
            watch.check()
            await asyncio.sleep(POLL_S)

    def delete(self, digest: str) -> bool:
        """Delete a folder unless a process uses it. Return True if it was deleted. Blocks."""
        if self.held[digest] or (fd := self._lock(digest, is_exclusive=True)) is None:
            return False
        try:
            self._delete_locked(digest)
        finally:
            os.close(fd)
        logger.info("folders.deleted folder=%s", self.folder(digest))
        return True

    def clean_up(self) -> None:
        """Delete complete folders beyond the `kept` newest, and old folders of builders and other models. Blocks."""
        own = self._own_by_last_use()
        for digest in own[self._kept :]:
            self.delete(digest)
        old = time.time() - LEFT_S
        for digest in self.digests().difference(own):
            if self._last_use(digest) < old:
                self.delete(digest)
        for digest in self._partial():
            if self.folder(digest).is_dir():
                # Processes that use the folder may hold the shared lock too. The lock only excludes a new build.
                if (fd := self._lock(digest, is_exclusive=False)) is not None:
                    if self.folder(digest).is_dir():
                        shutil.rmtree(self.partial(digest), ignore_errors=True)
                    os.close(fd)
            elif self._last_use(digest) < old:
                self.delete(digest)

    def make_room(self, needed: int, digest: str) -> None:
        """Do the work of `PartialFolder.make_room` for the partial folder of `digest`."""
        unused = iter([*self._partial(), *reversed(self._by_last_use())])
        while (problem := self._problem_of(needed, digest)) is not None:
            other = next(unused, None)
            if other is None:
                raise storage_failure(problem)
            if other != digest:
                self.delete(other)

    def move_old(self, digest: str, to: Path) -> bool:
        """Move the oldest unused folder that need not be kept. Return False if there is none. Blocks."""
        for old in reversed(self._own_by_last_use()[self._kept - 1 :]):
            if old == digest or self.held[old] or (fd := self._lock(old, is_exclusive=True)) is None:
                continue
            try:
                # Rename first: if a later step fails, the folder no longer counts as complete.
                with contextlib.suppress(FileNotFoundError):  # another process deleted it before the lock
                    self.folder(old).rename(to)
                self._delete_locked(old)
            finally:
                os.close(fd)
            if to.exists():
                logger.info("folders.reused folder=%s", self.folder(old))
                return True
        return False

    def _problem_of(self, needed: int, digest: str) -> str | None:
        """Return why `needed` bytes do not fit, or None. They include the bytes in the partial folder of `digest`."""
        has = _count_bytes_below(self.partial(digest))
        used = _count_bytes_below(self.root.parent) - has
        if self._max_bytes is not None and used + needed > self._max_bytes:
            return (
                f"{needed} bytes do not fit below {self.root.parent}: {used} bytes are in use there, and the limit is "
                f"{self._max_bytes} (--stage-bytes)"
            )
        free = shutil.disk_usage(self.root).free
        if needed - has > free:
            return (
                f"{needed - has} bytes do not fit on the disk of {self.root}: it has {free} free, with {used} in use; "
                f"{FREE_SPACE}"
            )
        return None

    def _lock(self, digest: str, *, is_exclusive: bool) -> int | None:
        return try_lock(self.lock_file(digest), is_exclusive=is_exclusive)

    def lock_file(self, digest: str) -> Path:
        """Return the path of the lock file of a digest."""
        return self.root / f".{digest}.lock"

    def _delete_locked(self, digest: str) -> None:
        partial = self.partial(digest)
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.folder(digest).rename(partial)
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.lock_file(digest).unlink()

    def _partial(self) -> list[str]:
        return [path.name.removeprefix(".").removesuffix(".partial") for path in self.root.glob(".*.partial")]

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.root.iterdir()]
        except FileNotFoundError:
            return []

    def _by_last_use(self) -> list[str]:
        """Return the complete folders, most recently used first."""
        return sorted(self.digests(), key=self._last_use, reverse=True)

    def _own_by_last_use(self) -> list[str]:
        """Return the complete folders of this store's model or of an unknown model, most recently used first."""
        return [digest for digest in self._by_last_use() if self._model_of(digest) in {"", self.model}]

    def _model_of(self, digest: str) -> str:
        try:
            with self.lock_file(digest).open("rb") as file:
                return _Mark.read(file.fileno()).model
        except FileNotFoundError:
            return ""

    def _last_use(self, digest: str) -> float:
        try:
            return self.lock_file(digest).stat().st_mtime
        except FileNotFoundError:
            return 0.0


def _count_bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                total += (Path(parent) / name).lstat().st_size
    return total


def _note_use(fd: int) -> None:
    """Set the time of a lock file exactly: time stamps of the kernel stay the same for some milliseconds."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))
