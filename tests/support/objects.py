"""Buckets of objects as tests use them."""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from nats.js.errors import NotFoundError

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ask

__all__ = ["BUCKET_BYTES", "files_in", "fresh_bucket", "stored_messages", "write_folder"]

BUCKET_BYTES = 64 * 1024**2
"""Small: it is set aside on a server that all tests share."""


@contextlib.asynccontextmanager
async def fresh_bucket(nats: Connection) -> AsyncIterator[str]:
    """Name a bucket that is not there yet; it is deleted on leaving."""
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    try:
        yield bucket
    finally:
        with contextlib.suppress(NotFoundError):
            await nats.jetstream().delete_stream(f"OBJ_{bucket}")


async def stored_messages(nats: Connection, bucket: str) -> int:
    """How many parts and descriptions a bucket holds."""
    messages: int = (await ask(nats, f"STREAM.INFO.OBJ_{bucket}"))["state"]["messages"]
    return messages


def write_folder(folder: Path, **sizes: int) -> Path:
    """Write files of random bytes; `__` in a name is a folder."""
    for name, size in sizes.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
