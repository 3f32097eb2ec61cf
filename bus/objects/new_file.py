"""Fetched files: they are written and hashed on their own thread, or already exist."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from ...schemas.errors import LocalProtocolError

__all__ = ["NewFile", "is_whole", "reason"]

READ_BYTES: Final = 4 * 1024**2
"""Bytes per read of a file that is hashed; larger reads are not faster."""


class NewFile:
    """A file that is written and hashed. Its methods block. An existing file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.digest = hashlib.sha256()

    def open(self) -> None:
        """Create the file and its parent folders. An existing file is removed first, because it may be a link."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._file = self._path.open("xb", buffering=0)

    def write(self, parts: list[bytes]) -> None:
        """Append chunks."""
        for part in parts:
            self.digest.update(part)
            self._write_all(memoryview(part))

    def _write_all(self, rest: memoryview) -> None:
        if self._file is None:
            raise LocalProtocolError(f"{self._path} is written before it is open")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        if self._file is not None:
            self._file.close()


def is_whole(path: Path, size: int, digest: bytes, on_read: Callable[[], None]) -> bool:
    """Return True if a regular file has this size and SHA-256. Read all of it, and call `on_read` after each part."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb", buffering=0) as file:
        if os.fstat(fd).st_size != size:
            return False
        sha = hashlib.sha256()
        while part := file.read(READ_BYTES):
            sha.update(part)
            on_read()
    return sha.digest() == digest


def reason(error: OSError) -> str:
    """Return the reason of an error, with the file."""
    return f"{error.strerror or error} ({error.filename})" if error.filename else f"{error.strerror or error}"
