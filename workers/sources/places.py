"""Where a worker keeps what it fetches."""

import contextlib
import shutil
from pathlib import Path
from typing import Final

from .locks import can_lock

__all__ = ["clear_old_cache", "store_root"]

SHARED: Final = "shared.weights"
"""Of all workers of a fleet on this machine; no worker is called so, as there is no dot in the name of one."""
_OLD_PREFIXES: Final = ("objects-", ".objects-")
"""Of folders that releases before 0.2 fetched into a folder of each worker."""


def store_root(cache: Path, worker: str) -> Path:
    """Return the folder that the workers of a fleet share, or this worker's own on a file system without locks.

    Blocks a moment. Where nothing can be written the first staging says so.
    """
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if not can_lock(cache):
            return cache / f"{worker}.weights"
    return cache / SHARED


def clear_old_cache(folder: Path) -> None:
    """Delete what an older release of the worker fetched; nothing else that lies there. Blocks."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name.startswith(_OLD_PREFIXES):
            shutil.rmtree(entry, ignore_errors=True)
    with contextlib.suppress(OSError):  # other things are in it
        folder.rmdir()
