"""Object store buckets for tests."""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from nats.js.errors import NotFoundError

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ask

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
    """Return the number of messages in a bucket: object chunks and descriptions."""
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
