"""Folders of the object store, which tests fetch as a worker does."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from rollbus.bus.nats.server import Server
from rollbus.bus.objects.reader import ObjectReader
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.fetcher import Checks, Fetcher
from rollbus.workers.sources.store import FolderStore
from rollbus.workers.sources.threads import Progress
from tests.support.checkpoints import ignore


async def fetch_folder(server: str | Server, objects: str, cache: Path, report: Callable[[str], None] = ignore) -> Path:
    """Fetch the folder of an upload into `cache` without checks, release its hold and return its path."""
    store = FolderStore(cache, model="m", max_bytes=None, kept=2)
    progress = Progress(WeightSource(objects=objects), report)
    fetched = await Fetcher(ObjectReader(server, name="test"), store).fetch(objects, Checks(_any, _any), progress)
    fetched.hold.release()
    return fetched.hold.folder


def complete(cache: Path) -> list[Path]:
    """Return the folders that appear complete."""
    return [entry for entry in cache.glob("*") if not entry.name.startswith(".")]


def partial(cache: Path) -> list[Path]:
    """Return the partial folders, which the next fetch continues."""
    return list(cache.glob(".*.partial"))


def open_files(folder: Path) -> list[Path]:
    """Return the files below a folder that this process has open, including its lock files."""
    files: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # the file descriptor of this loop, or one that another thread closed
            files.append(link.readlink())
    return [file for file in files if file.is_relative_to(folder)]


def _any(_: object) -> None:
    """Accept any folder."""
