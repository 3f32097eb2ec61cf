"""Private files, which only their owner can read and which are written as a whole."""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["FILE_MODE", "is_private", "replace_file", "write_new"]

FILE_MODE: Final = 0o600


def is_private(path: str | os.PathLike[str]) -> bool:
    """Return True if only the owner can read the file."""
    return not stat.S_IMODE(Path(path).stat().st_mode) & ~FILE_MODE


def write_new(path: Path, data: bytes) -> None:
    """Create a file. The file must not exist."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        file.write(data)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content. The file keeps its owner."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    write_new(partial, data)
    with contextlib.suppress(FileNotFoundError):
        before = path.stat()
        if before.st_uid != partial.stat().st_uid:
            os.chown(partial, before.st_uid, before.st_gid)
    partial.replace(path)
