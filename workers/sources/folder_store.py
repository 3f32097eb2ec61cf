"""Complete, immutable folders, each named by the digest of its content, that the workers of a machine share.

Beside the folder `<digest>` lie `.<digest>.lock`, exclusive while a process builds or deletes the folder and shared
while one uses it, and `.<digest>.partial`, in which it is built. A folder gets its name when it is complete. So a
killed builder leaves only a partial folder, which the next builder of that digest goes on with. The lock file of a
complete folder says when its content was verified last, what its files were then, and of which model it is.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from ...schemas.errors import ControlCode, ControlError
from .locks import BUILDER, LockWatch, try_lock
from .stamps import boot_id, files_stamp

__all__ = ["FolderStore", "Hold", "PartialFolder"]

logger = logging.getLogger(__name__)

LEFT_S: Final = 24 * 3600.0
"""What no process has held for so long is deleted: partial folders, and folders of models that are served elsewhere."""
MAX_MARK_BYTES: Final = 4096
"""Read of a lock file: ids have about 100, and a model's name is shorter than the rest."""
RETIRING: Final = ".retiring.lock"
"""Locked, for an instant, by the process that takes away a damaged folder."""
POLL_S: Final = 0.1
"""Between two looks at a lock that another process holds. Waiting for it in a thread could not be cancelled."""


class _Mark(NamedTuple):
    """What the lock file of a complete folder says."""

    boot: str
    """In which the content was built, or verified last."""
    files: str
    """Their stamp then."""
    model: str
    """Of the workers that did."""

    @classmethod
    def read(cls, fd: int) -> Self:
        lines = os.pread(fd, MAX_MARK_BYTES, 0).decode(errors="replace").split("\n")
        return cls(*lines) if len(lines) == len(cls._fields) else cls("", "", "")

    def write(self, fd: int) -> None:
        os.ftruncate(fd, os.pwrite(fd, "\n".join(self).encode(), 0))


class Hold:
    """A complete folder that stays as long as this is not released."""

    def __init__(self, store: "FolderStore", digest: str, fd: int) -> None:
        self.digest = digest
        self.folder = store.folder(digest)
        self._store = store
        self._fd: int | None = fd
        store.held[digest] += 1

    def __repr__(self) -> str:
        """One line with the folder."""
        return f"<Hold {self.folder}>"

    @property
    def is_of_this_boot(self) -> bool:
        """True if it was verified since the machine has started: a crash may have lost what was not on the disk yet."""
        return self._fd is not None and _Mark.read(self._fd).boot == boot_id()

    def is_unchanged(self) -> bool:
        """Return True if its files are those that were verified last, by their sizes and times. Blocks."""
        return self._fd is not None and _Mark.read(self._fd).files == files_stamp(self.folder)

    def confirm(self, files: str) -> None:
        """Note for the others on this machine that its content was verified.

        Args:
            files: the stamp of its files, taken before that.
        """
        if self._fd is not None:
            _Mark(boot_id(), files, self._store.model).write(self._fd)

    def retire(self) -> None:
        """Take a damaged folder away, although others may hold it, and release it; another can be built then. Blocks.

        Nothing happens if another process did so before, or does so now.
        """
        if self._fd is not None:
            self._store.retire(self.digest, self._fd)
        self.release()

    def release(self) -> None:
        """Let it be deleted; a second time does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._store.held[self.digest] -= 1


class PartialFolder:
    """A folder that this process alone builds; end it with `complete` or `leave`."""

    def __init__(self, store: "FolderStore", digest: str, fd: int) -> None:
        self.digest = digest
        self.path = store.partial(digest)
        """For all that the building needs; what an earlier try left is in it."""
        self._store = store
        self._fd = fd

    def __repr__(self) -> str:
        """One line with the path."""
        return f"<PartialFolder {self.path}>"

    def make_room(self, needed: int) -> None:
        """Have room for `needed` bytes below `path`, by deleting what nobody uses if it must be. Blocks.

        Raises:
            ControlError: `storage`, naming what is used, needed and allowed.
        """
        self._store.make_room(needed, self.digest)

    def reuse(self, name: str) -> Path:
        """Return the folder `name` below `path`, with the files of an old generation that nobody uses, if there is one.

        Files that exist are written faster than new ones. Their content is rubbish. Blocks.
        """
        folder = self.path / name
        if not folder.exists() and not self._store.move_old(self.digest, folder):
            folder.mkdir()
        return folder

    def complete(self, folder: Path, files: str) -> None:
        """Have `folder`, which is below `path`, become the complete folder; it is held by nobody then.

        Args:
            files: the stamp of its files.
        """
        _Mark(boot_id(), files, self._store.model).write(self._fd)
        folder.rename(self._store.folder(self.digest))
        _note_use(self._fd)
        os.close(self._fd)

    def touch(self) -> None:
        """Show the processes that wait for this one that it gets on."""
        _note_use(self._fd)

    def leave(self, *, discard: bool) -> None:
        """Build no more of it.

        Args:
            discard: delete what there is of it, which blocks; else the next try goes on with that.
        """
        if discard:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


class FolderStore:
    """The folders below `root`.

    Args:
        root: made when needed, readable for this user alone.
        model: of the workers that use it; those of other models may have folders there, too.
        max_bytes: of all below the parent of `root`; None: as much as the disk has.
        kept: complete folders of the model that stay; older ones go when nobody holds them.
    """

    def __init__(self, root: Path, *, model: str, max_bytes: int | None, kept: int) -> None:
        self.root = root
        self.model = model
        self.held: Counter[str] = Counter()
        """How often this process holds each digest, for file systems without locks."""
        self._max_bytes = max_bytes
        self._kept = kept

    def __repr__(self) -> str:
        """One line with the root."""
        return f"<FolderStore {self.root} kept={self._kept}>"

    def folder(self, digest: str) -> Path:
        """Name the complete folder of a digest."""
        return self.root / digest

    def partial(self, digest: str) -> Path:
        """Name the folder in which it is built."""
        return self.root / f".{digest}.partial"

    def digests(self) -> frozenset[str]:
        """Return what is complete. Blocks."""
        return frozenset(self._complete())

    def hold(self, digest: str) -> Hold | None:
        """Hold a complete folder; None: there is none, or it is just being deleted. Blocks a moment."""
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
        """Hold the complete folder, or begin to build it; waits while another process builds it.

        Args:
            on_wait: called if this has to wait.

        Raises:
            ControlError: `storage`: the other process does not get on.
            OSError: the root cannot be made or written.
        """
        watch: LockWatch | None = None
        while True:
            for folder in (self.root.parent, self.root):  # the mode is of the last one that is made
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (hold := self.hold(digest)) is not None:
                return hold
            if (fd := self._lock(digest, is_exclusive=True)) is not None:
                with contextlib.ExitStack() as unless_begun:
                    # Also where the disk is full: a lock that stays would keep out this process itself.
                    unless_begun.callback(os.close, fd)
                    if not self.folder(digest).is_dir():
                        self.partial(digest).mkdir(exist_ok=True, mode=0o700)
                        os.truncate(fd, os.pwrite(fd, f"{BUILDER}{os.getpid()}".encode(), 0))
                        unless_begun.pop_all()
                        return PartialFolder(self, digest, fd)
            if watch is None:
                watch = LockWatch(self._lock_file(digest))
                on_wait()
            watch.check()
            await asyncio.sleep(POLL_S)

    def delete(self, digest: str) -> bool:
        """Delete a folder unless somebody uses it; return True if it is gone. Blocks."""
        if self.held[digest] or (fd := self._lock(digest, is_exclusive=True)) is None:
            return False
        try:
            self._delete_locked(digest)
        finally:
            os.close(fd)
        logger.info("folders.deleted folder=%s", self.folder(digest))
        return True

    def retire(self, digest: str, fd: int) -> None:
        """As `Hold.retire`, of a hold whose lock is `fd`."""
        # Other processes hold the lock, too, and find the damage: one at a time looks whose lock it is, and deletes.
        if (mutex := try_lock(self.root / RETIRING, is_exclusive=True)) is None:
            return
        damaged = self.root / f".{uuid.uuid4().hex}.partial"
        try:
            if not os.path.samestat(os.fstat(fd), self._lock_file(digest).stat()):
                return
            # Without its lock file it is a folder that nobody has verified, should this process be killed here.
            self._lock_file(digest).unlink()
            self.folder(digest).rename(damaged)
        except FileNotFoundError:  # another process was quicker
            return
        finally:
            os.close(mutex)
        shutil.rmtree(damaged, ignore_errors=True)
        logger.info("folders.retired folder=%s", self.folder(digest))

    def clean_up(self) -> None:
        """Delete complete folders beyond those that are kept, and what builders and other models left. Blocks."""
        own = self._own_by_last_use()
        for digest in own[self._kept :]:
            self.delete(digest)
        old = time.time() - LEFT_S
        for digest in self.digests().difference(own):
            if self._last_use(digest) < old:
                self.delete(digest)
        for digest in self._partial():
            if self.folder(digest).is_dir():
                # Users of the folder may hold it, but nobody may build another under this lock.
                if (fd := self._lock(digest, is_exclusive=False)) is not None:
                    if self.folder(digest).is_dir():
                        shutil.rmtree(self.partial(digest), ignore_errors=True)
                    os.close(fd)
            elif self._last_use(digest) < old:
                self.delete(digest)

    def make_room(self, needed: int, digest: str) -> None:
        """As `PartialFolder.make_room`, for the partial folder of `digest`."""
        unused = iter([*self._partial(), *reversed(self._by_last_use())])
        while (problem := self._problem_of(needed, digest)) is not None:
            other = next(unused, None)
            if other is None:
                raise ControlError(ControlCode.STORAGE, problem)
            if other != digest:
                self.delete(other)

    def move_old(self, digest: str, to: Path) -> bool:
        """Move the oldest folder that need not be kept and nobody uses; return False if there is none. Blocks."""
        for old in reversed(self._own_by_last_use()[self._kept - 1 :]):
            if old == digest or self.held[old] or (fd := self._lock(old, is_exclusive=True)) is None:
                continue
            try:
                # First away from its name: whatever happens from here on, it is no complete folder any more.
                self.folder(old).rename(to)
                self._delete_locked(old)
            finally:
                os.close(fd)
            logger.info("folders.reused folder=%s", self.folder(old))
            return True
        return False

    def _problem_of(self, needed: int, digest: str) -> str | None:
        """Say why `needed` bytes do not fit, with what lies in the partial folder of `digest` among them."""
        has = _bytes_below(self.partial(digest))
        used = _bytes_below(self.root.parent) - has
        if self._max_bytes is not None and used + needed > self._max_bytes:
            return (
                f"{needed} bytes do not fit below {self.root.parent}: {used} bytes are in use there, and the limit is "
                f"{self._max_bytes} (--stage-bytes)"
            )
        free = shutil.disk_usage(self.root).free
        if needed - has > free:
            return f"{needed - has} bytes do not fit on the disk of {self.root}: it has {free} free, with {used} in use"
        return None

    def _lock(self, digest: str, *, is_exclusive: bool) -> int | None:
        return try_lock(self._lock_file(digest), is_exclusive=is_exclusive)

    def _lock_file(self, digest: str) -> Path:
        return self.root / f".{digest}.lock"

    def _delete_locked(self, digest: str) -> None:
        partial = self.partial(digest)
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.folder(digest).rename(partial)
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self._lock_file(digest).unlink()

    def _complete(self) -> Iterator[str]:
        return (name for name in self._names() if not name.startswith("."))

    def _partial(self) -> list[str]:
        names = [name for name in self._names() if name.startswith(".") and name.endswith(".partial")]
        return [name.removeprefix(".").removesuffix(".partial") for name in names]

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.root.iterdir()]
        except FileNotFoundError:
            return []

    def _by_last_use(self) -> list[str]:
        """Return the complete folders, the last used one first."""
        return sorted(self._complete(), key=self._last_use, reverse=True)

    def _own_by_last_use(self) -> list[str]:
        """Return those of this store's model, and those of which nothing is known."""
        return [digest for digest in self._by_last_use() if self._model_of(digest) in {"", self.model}]

    def _model_of(self, digest: str) -> str:
        try:
            with self._lock_file(digest).open("rb") as file:
                return _Mark.read(file.fileno()).model
        except FileNotFoundError:
            return ""

    def _last_use(self, digest: str) -> float:
        try:
            return self._lock_file(digest).stat().st_mtime
        except FileNotFoundError:
            return 0.0


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # others delete meanwhile
                total += (Path(parent) / name).lstat().st_size
    return total


def _note_use(fd: int) -> None:
    """Stamp a lock file with the exact time: the system's own stamp is the same for some milliseconds."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))
