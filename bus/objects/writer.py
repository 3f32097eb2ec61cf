"""Putting a folder into the object store: all of it, or nothing."""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Final

from nats.aio.client import Client
from nats.nuid import NUID

from ...schemas.errors import BusBroken, ControlCode, ControlError
from ..nats.connection import Connection
from .catalog import BUCKET_BYTES, delete_objects, ensure_bucket, list_objects
from .layout import MAX_FILES, ObjectInfo, check_path, split_objects
from .sender import open_sender
from .signed import describe_folder, store_descriptions
from .upload import put_file

__all__ = ["delete_stored", "put_folder"]

logger = logging.getLogger(__name__)

CLEANUP_S: Final = 15.0
"""For taking back what a failed put has stored: a server that was restarted is back within that."""
RETRY_S: Final = 0.5
"""Between attempts at it."""


async def put_folder(nats: Connection, bucket: str, prefix: str, folder: Path, *, max_bytes: int = BUCKET_BYTES) -> str:
    """Store the files of `folder`, those of its folders too, as the objects below `prefix`; return `<bucket>/<prefix>`.

    Nothing is seen of it before all is stored. Hidden files and folders are left out; symlinks to files are followed.

    Args:
        prefix: nothing may be stored below it yet: what is stored never changes.
        max_bytes: of the bucket, if it has to be made.

    Cancellation: takes back what was stored.

    Raises:
        ControlError: `bad_source`: names, no files or too many, or one that cannot be read; `storage`: the bucket is
            full, or has something below `prefix`. Nothing stays stored.
        BusBroken: the connection or JetStream failed. What was stored is taken back if the server returns soon; else
            parts stay, of which no object knows.
        BusClosed: the connection was closed here.
    """
    objects = f"{bucket}/{prefix}"
    split_objects(objects)
    files = await asyncio.to_thread(_find_files, folder)
    await ensure_bucket(nats, bucket, max_bytes=max_bytes)
    if await list_objects(nats, bucket, prefix):
        raise ControlError(ControlCode.STORAGE, f"objects:{objects} exists; delete it first, or take another prefix")
    started = time.monotonic()
    infos: list[ObjectInfo] = []
    nuid = NUID()
    is_stored = False
    try:
        async with open_sender(nats) as sender:
            for path in files:
                infos.append(ObjectInfo(name=f"{prefix}/{path}", bucket=bucket, nuid=nuid.next().decode()))
                infos[-1] = await put_file(sender, infos[-1], folder / path)
            await sender.finish()
            if nats.signatures.own is not None:
                infos = describe_folder(objects, infos)
            await store_descriptions(nats, sender, infos)
        is_stored = True
    finally:
        if not is_stored:
            await delete_stored(nats, bucket, tuple(infos))
    size, seconds = sum(info.size for info in infos), time.monotonic() - started
    logger.info("objects.put objects=%s files=%s bytes=%s seconds=%.3f", objects, len(infos), size, seconds)
    return objects


def _find_files(folder: Path) -> list[str]:
    """List the regular files below `folder`, relative to it."""

    def fail(error: OSError) -> None:
        raise ControlError(ControlCode.BAD_SOURCE, f"{error.filename} cannot be read: {error.strerror}") from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
        if len(files) > MAX_FILES:
            raise ControlError(ControlCode.BAD_SOURCE, f"{folder} has more than {MAX_FILES} files")
    if not files:
        raise ControlError(ControlCode.BAD_SOURCE, f"{folder} has no files")
    paths = [file.relative_to(folder).as_posix() for file in files]
    for path in paths:
        check_path(path, f"a file of {folder}")
    return paths


async def delete_stored(nats: Client, bucket: str, infos: tuple[ObjectInfo, ...]) -> None:
    """Delete what was stored; a connection that broke may come back for it. What fails is logged."""
    try:
        async with asyncio.timeout(CLEANUP_S):
            while not nats.is_closed:
                try:
                    await delete_objects(nats, bucket, infos)
                    return
                except BusBroken:
                    await asyncio.sleep(RETRY_S)
    except (TimeoutError, ControlError) as error:
        logger.warning("objects.left_behind bucket=%s objects=%s error=%s", bucket, len(infos), error)
