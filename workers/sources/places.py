"""The cache folders into which a worker fetches weights and adapters."""

import contextlib
import shutil
from pathlib import Path
from typing import Final

from .locks import can_lock

__all__ = ["clear_old_cache", "store_root"]

SHARED: Final = "shared.weights"
"""The folder that all workers of a fleet on a machine share. Worker names have no dot, so no worker has this name."""
_OLD_PREFIXES: Final = ("objects-", ".objects-")
"""The name prefixes of folders that releases before 0.2 fetched into one folder for each worker."""


def store_root(cache: Path, worker: str) -> Path:
    """Return the folder that the workers of a fleet share. On a file system without locks, return this worker's own.

    Blocks briefly. If the folder is not writable, this call raises nothing, and the first staging fails.
    """
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if not can_lock(cache):
            return cache / f"{worker}.weights"
    return cache / SHARED


def clear_old_cache(folder: Path) -> None:
    """Delete the folders that an older release of the worker fetched, and no other files. Blocks."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name.startswith(_OLD_PREFIXES):
            shutil.rmtree(entry, ignore_errors=True)
    with contextlib.suppress(OSError):  # it contains other files
        folder.rmdir()
