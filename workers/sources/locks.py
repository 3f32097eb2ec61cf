"""Locks on files, by which the worker processes of a machine share folders."""

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
"""In a lock file, before the process id of the process that builds."""
STALLED_S: Final = 60.0
"""A builder touches the lock file with all that it fetches or hashes; a disk or a store may stand still for some."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What file systems without locks answer."""


def can_lock(folder: Path) -> bool:
    """Return True if the file system of `folder` has locks. Blocks a moment.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _NO_LOCKS
    return True


def try_lock(path: Path, *, is_exclusive: bool) -> int | None:
    """Lock a file, which is made if missing; return its descriptor, whose closing ends the lock. Never waits.

    None: others hold it. A file system without locks locks nothing; only one process may use the file then.

    Raises:
        OSError: it cannot be made.
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
        # Whoever deletes the file does so under its lock: a lock of a deleted file keeps nobody out.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


class LockWatch:
    """Sees whether the process that holds a lock gets on: it touches the file.

    Args:
        clock: monotonic seconds.
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
        """Look at the file. Blocks a moment.

        Raises:
            ControlError: `storage`: nobody has touched it for `STALLED_S`; names the process.
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
                f"{self._path} is locked by the process {pid}, which has not got on for {STALLED_S:g} s",
            )
