"""File locks, which the worker processes of a machine use to share folders."""

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...schemas.errors import ControlCode, ControlError

__all__ = ["BUILDER", "LockWatch", "can_lock", "try_lock"]

BUILDER: Final = "builder "
"""The text in a lock file before the process id of the builder."""
STALLED_S: Final = 60.0
"""Seconds without progress after which a builder counts as stalled. A builder touches the lock file whenever it
fetches or hashes bytes. The limit allows for a disk or an object store that does not respond for a while."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""The error numbers of file systems without locks."""


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

    def __repr__(self) -> str:
        """One line with the file."""
        return f"<LockWatch {self._path}>"

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
            raise ControlError(
                ControlCode.STORAGE,
                f"{self._path} is locked by the process {pid}, which has made no progress for {STALLED_S:g} s",
            )
