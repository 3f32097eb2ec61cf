"""The folders that a worker may read: the real path of the folder and of each file in it is below an allowed root."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...schemas.errors import ControlCode, ControlError

__all__ = ["allowed_folder", "bad_source", "open_regular"]

MAX_ENTRIES: Final = 16_384
"""Maximum number of files and folders in a source: far more than a checkpoint has, and few enough to check quickly."""
_MAX_SHOWN: Final = 8
"""Maximum number of roots in an error message."""


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """Return the real path of the folder `path`, with symlinks and `..` resolved. Blocks.

    Args:
        path: an absolute path.
        roots: the allowed folders, which may be symlinks themselves. If there are none, no path is allowed.

    Raises:
        ControlError: `path_refused`: the real path of the folder, or of a file in it, is below no root; `bad_source`:
            `path` is no folder, or contains an entry that is neither a regular file nor a folder.
    """
    if not path.startswith("/") or "\0" in path:
        raise ControlError(ControlCode.PATH_REFUSED, f"{path[:1000]!r} is refused; allowed: an absolute path")
    # Beyond the first directory, clients must not learn what exists outside the roots.
    if not os.path.lexists("/" + path.lstrip("/").partition("/")[0]):
        raise bad_source(f"{path[:1000]} does not exist on the worker's machine")
    folder = Path(os.path.realpath(path))
    _check_allowed(folder, roots, path)
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise bad_source(f"{path} is not a directory")
        _check_entries(folder, path, roots)
    except FileNotFoundError as error:
        shown = _shown_root(error.filename, folder, path)
        raise bad_source(f"{shown} does not exist on the worker's machine") from error
    except OSError as error:
        shown = _shown_root(error.filename, folder, path)
        raise bad_source(f"{shown} cannot be read: {error.strerror or error}") from error
    return folder


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Opening a named pipe does not block.

    Raises:
        ControlError: `bad_source`: the file cannot be opened or is no regular file.
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
    """Return the error for a source that cannot be used. Its message consists of `words`, joined by spaces."""
    return ControlError(ControlCode.BAD_SOURCE, " ".join(map(str, words)))


def _check_allowed(real: Path, roots: Sequence[Path], shown: str) -> None:
    """Check that `real` is below a root. The error names `shown`, because clients must not learn symlink targets.

    Raises:
        ControlError: `path_refused`.
    """
    if any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        return
    allowed = ", ".join(map(str, roots[:_MAX_SHOWN])) or "none"
    raise ControlError(
        ControlCode.PATH_REFUSED,
        f"{shown[:1000]} is outside the worker's directories of weights, or a symlink leads out of them; allowed: "
        f"{allowed}; for another, start the worker with --weight-root DIR",
    )


def _check_entries(folder: Path, path: str, roots: Sequence[Path]) -> None:
    """Check all entries of the folder, because an engine follows symlinks and reads every file.

    Args:
        path: the name of the folder in errors.
    """

    def fail(error: OSError) -> None:
        raise error

    entries = 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise bad_source(f"{path} has more than {MAX_ENTRIES} files")
        for entry in (Path(parent, name) for name in folders + files):
            shown = _shown_root(entry, folder, path)
            if entry.is_symlink():
                _check_allowed(Path(os.path.realpath(entry)), roots, shown)
            mode = entry.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise bad_source(f"{shown} is no regular file")


def _shown_root(entry: str | Path | None, folder: Path, path: str) -> str:
    """Convert the path of an entry of the real `folder` to a path below `path`."""
    if entry is None or not Path(entry).is_relative_to(folder):
        return path
    return str(Path(path, Path(entry).relative_to(folder)))
