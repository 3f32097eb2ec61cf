"""Which folders a worker may read: their real path, and that of every file in them, lies below an allowed root."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from schemas.errors import ControlCode, ControlError

__all__ = ["allowed_folder", "open_regular"]

MAX_ENTRIES: Final = 16_384
"""Files and folders below a source: far more than a checkpoint has, few enough to look at each in a moment."""
_MAX_SHOWN: Final = 8
"""Roots in an error message."""


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """Return the real path of the folder `path`, symlinks and `..` resolved. Blocks.

    Args:
        path: absolute.
        roots: folders, which may be symlinks themselves. None of them: nothing is allowed.

    Raises:
        ControlError: `path_refused`: it, or a file in it, really lies elsewhere; `bad_source`: it is no folder, or has
            something in it that is no file.
    """
    if not roots:
        raise ControlError(
            ControlCode.PATH_REFUSED,
            f"{path[:1000]} is refused, as every path: the worker was started without --weight-root DIR",
        )
    if not path.startswith("/") or "\0" in path:
        raise ControlError(ControlCode.PATH_REFUSED, f"{path[:1000]!r} is refused; allowed: an absolute path")
    real_roots = [Path(os.path.realpath(root)) for root in roots]
    folder = Path(os.path.realpath(path))
    _check_below(folder, real_roots, path)
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise ControlError(ControlCode.BAD_SOURCE, f"{path} is no folder")
        _check_entries(folder, real_roots)
    except OSError as error:
        raise ControlError(
            ControlCode.BAD_SOURCE, f"{error.filename or path} cannot be read: {error.strerror or error}"
        ) from error
    return folder


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; anything but a file is refused, without waiting for it.

    Raises:
        ControlError: `bad_source`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ControlError(ControlCode.BAD_SOURCE, f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ControlError(ControlCode.BAD_SOURCE, f"{path} is no regular file")
    return fd


def _check_below(real: Path, real_roots: list[Path], shown: str) -> None:
    if any(real.is_relative_to(root) for root in real_roots):
        return
    allowed = ", ".join(str(root) for root in real_roots[:_MAX_SHOWN])
    really = "" if str(real) == shown else f", really {real},"
    raise ControlError(
        ControlCode.PATH_REFUSED,
        f"{shown}{really} is below no allowed folder; allowed: {allowed}; --weight-root DIR allows another",
    )


def _check_entries(folder: Path, real_roots: list[Path]) -> None:
    """Check what is in the folder, where an engine would follow symlinks and read whatever lies there."""

    def fail(error: OSError) -> None:
        raise error

    entries = 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise ControlError(ControlCode.BAD_SOURCE, f"{folder} has more than {MAX_ENTRIES} files")
        for entry in (Path(parent, name) for name in folders + files):
            if entry.is_symlink():
                _check_below(Path(os.path.realpath(entry)), real_roots, str(entry))
            mode = entry.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise ControlError(ControlCode.BAD_SOURCE, f"{entry} is no regular file")
