"""Which folders a worker may read: their real path, and that of every file in them, lies below an allowed root."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...schemas.errors import ControlCode, ControlError

__all__ = ["allowed_folder", "bad_source", "open_regular"]

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
    folder = Path(os.path.realpath(path))
    _check_allowed(folder, roots, path)
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise bad_source(f"{path} is no folder")
        _check_entries(folder, path, roots)
    except OSError as error:
        shown = _shown(error.filename, folder, path)
        raise bad_source(f"{shown} cannot be read: {error.strerror or error}") from error
    return folder


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; anything but a file is refused, without waiting for it.

    Raises:
        ControlError: `bad_source`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise bad_source(f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise bad_source(f"{path} is no regular file")
    return fd


def bad_source(*words: object) -> ControlError:
    """Make the error of a source that cannot be used; its message is `words`."""
    return ControlError(ControlCode.BAD_SOURCE, " ".join(map(str, words)))


def _check_allowed(real: Path, roots: Sequence[Path], shown: str) -> None:
    """Check that `real` lies below a root. The error names `shown`: clients must not learn where symlinks lead.

    Raises:
        ControlError: `path_refused`.
    """
    if any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        return
    allowed = ", ".join(map(str, roots[:_MAX_SHOWN]))
    raise ControlError(
        ControlCode.PATH_REFUSED,
        f"{shown} is below no allowed folder, or a symlink leads out of it; allowed: {allowed}; --weight-root DIR "
        "allows another",
    )


def _check_entries(folder: Path, path: str, roots: Sequence[Path]) -> None:
    """Check what is in the folder, where an engine would follow symlinks and read whatever lies there.

    Args:
        path: what errors call the folder.
    """

    def fail(error: OSError) -> None:
        raise error

    entries = 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise bad_source(f"{path} has more than {MAX_ENTRIES} files")
        for entry in (Path(parent, name) for name in folders + files):
            shown = _shown(entry, folder, path)
            if entry.is_symlink():
                _check_allowed(Path(os.path.realpath(entry)), roots, shown)
            mode = entry.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise bad_source(f"{shown} is no regular file")


def _shown(entry: str | Path | None, folder: Path, path: str) -> str:
    """Say an entry of the real `folder` as an entry of `path`."""
    if entry is None or not Path(entry).is_relative_to(folder):
        return path
    return str(Path(path, Path(entry).relative_to(folder)))
