"""Locks on files, by which the worker processes of a machine share folders."""

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["can_lock", "try_lock"]

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
