"""The check of a directory before a program needs to write into it."""

from pathlib import Path
from tempfile import TemporaryFile

from .errors import InvalidRequest

__all__ = ["check_writable"]


def check_writable(name: str, folder: Path, mode: int = 0o777) -> None:
    """Check that files can be written into a directory. Create the directory if it is missing.

    Args:
        name: the option or the noun before the directory in the error.
        mode: permissions of a new directory.

    Raises:
        InvalidRequest: no file can be written.
    """
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        problem, allowed = f"cannot be written: {exc.strerror}", "a directory in which this user may create files"
        raise InvalidRequest(field=f"{name} {folder}", problem=problem, allowed=allowed) from exc
