"""Object store buckets for tests."""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from nats.js.errors import NotFoundError

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.objects.reader import ObjectReader
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.fetcher import Checks, Fetcher
from rollbus.workers.sources.store import FolderStore
from rollbus.workers.sources.threads import Progress
from tests.support.checkpoints import ignore

BUCKET_BYTES = 64 * 1024**2
"""Small, because a bucket reserves its size on the server that all tests share."""


@contextlib.asynccontextmanager
async def fresh_bucket(nats: Connection) -> AsyncIterator[str]:
    """Return the name of a bucket that does not exist yet, and delete the bucket at the end of the block."""
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    try:
        yield bucket
    finally:
        with contextlib.suppress(NotFoundError):
            await nats.jetstream().delete_stream(f"OBJ_{bucket}")


async def stored_messages(nats: Connection, bucket: str) -> int:
    """Return the number of messages in a bucket: object parts and descriptions."""
    messages: int = (await ask(nats, f"STREAM.INFO.OBJ_{bucket}"))["state"]["messages"]
    return messages


def write_folder(folder: Path, **sizes: int) -> Path:
    """Write files of random bytes; `__` in a name separates folders."""
    for name, size in sizes.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Folders of the object store, which tests fetch as a worker does.


async def fetch_folder(server: str | Server, objects: str, cache: Path, report: Callable[[str], None] = ignore) -> Path:
    """Fetch the folder of an upload into `cache` without checks, release its hold and return its path."""
    store = FolderStore(cache, model="m", max_bytes=None, kept=2)
    progress = Progress(WeightSource(objects=objects), report)
    fetched = await Fetcher(ObjectReader(server, name="test"), store, Checks(_any, _any), progress).fetch(objects)
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
