"""The Unix socket through which the user of a worker asks and drains it, without NATS.

Only this user can connect: the socket has mode 0600 from its creation on, and no other user may replace it, because the
directory belongs to this user, and no other user may write into it.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ..schemas.errors import InvalidRequest, RollbusError

MAX_PATH_BYTES: Final = 107
"""Maximum bytes of the path of a Unix socket on Linux."""
BACKLOG: Final = 16
DIRECTORY: Final = "an existing or new directory of this user, into which no other user may write"


@contextmanager
def listen_locally(path: Path) -> Iterator[socket.socket]:
    """Listen at a Unix socket while the block runs, then remove the socket file. The file of a dead worker is replaced.

    A missing directory is created, but not its parents. PATH.lock stays: a lock on it orders workers that start.

    Raises:
        InvalidRequest: the path is too long or has a file that is not a socket, or other users may write its directory.
        RollbusError: another process listens there, or the file system does not permit it.
    """
    path = path.absolute()
    try:
        _check_directory(path)
        with os.fdopen(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RollbusError(_in_use(path)) from None
            listener = _bind(path)
            with listener:
                try:
                    yield listener
                finally:
                    # The lock is still held, so this is not the file of a later worker.
                    with suppress(FileNotFoundError):
                        path.unlink()
    except OSError as exc:
        raise RollbusError(f"cannot listen at --socket {path}: {exc.strerror or exc}") from exc


def _check_directory(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        allowed = f"at most {MAX_PATH_BYTES} bytes"
        raise InvalidRequest(f"--socket {path}", "is too long", allowed)
    folder, problem = path.parent, ""
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to the user {found.st_uid}, but this process is the user {os.geteuid()}"
    elif found.st_mode & 0o022:
        problem = f"may be written by other users: its mode is {stat.S_IMODE(found.st_mode):04o}"
    if problem:
        raise InvalidRequest(f"--socket: {folder}", problem, DIRECTORY)


def _bind(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            allowed = "a new file, or the socket of a worker that ended"
            raise InvalidRequest(f"--socket {path}", "is a file but not a socket", allowed)
        if _is_live(path):
            raise RollbusError(_in_use(path))
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux gives the file the mode of the socket, so there is no moment in which others may connect.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_live(path: Path) -> bool:
    """Return True if a process listens at a socket, even if it does not accept connections in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def _in_use(path: Path) -> str:
    return f"cannot listen at --socket {path}: another process uses it; give each worker a path of its own"
