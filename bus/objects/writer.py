"""Stores a folder in the object store completely or not at all."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from nats.aio.client import Client
from nats.nuid import NUID

from ...schemas.errors import BusBroken, ControlCode, ControlError
from ..nats.connection import Connection
from ..nats.jetstream import ApiError, ask
from .catalog import BUCKET_BYTES, delete_objects, ensure_bucket, list_objects
from .layout import MAX_FILES, ObjectInfo, check_path, split_objects, stream_of
from .sender import open_sender
from .signed import describe_folder, store_descriptions
from .upload import put_file

__all__ = ["delete_stored", "put_folder"]

logger = logging.getLogger(__name__)

CLEANUP_S: Final = 15.0
"""Seconds for removing the objects of a failed upload; a restarted server is back within that time."""
RETRY_S: Final = 0.5
"""Seconds between attempts of the removal."""


async def put_folder(
    nats: Connection,
    bucket: str,
    prefix: str,
    folder: Path,
    *,
    max_bytes: int = BUCKET_BYTES,
    needed_bytes: Callable[[int], int] | None = None,
) -> str:
    """Store the files in `folder` and its subfolders as the objects below `prefix`. Return `<bucket>/<prefix>`.

    Readers find no file before all are stored. Hidden files and folders are skipped. Symlinks to files are followed.

    Args:
        prefix: prefix below which nothing is stored yet, because stored objects never change.
        max_bytes: size of the bucket if it must be created.
        needed_bytes: function from the bytes of the files to the free bytes that the bucket must have; None: no check
            before the upload.

    Cancellation: removes the stored objects.

    Raises:
        ControlError: `bad_source`: a name is not valid, there are no files or too many, or a file cannot be read;
            `storage`: the bucket is full, or has objects below `prefix`. Nothing stays stored.
        BusBroken: the connection or JetStream failed. The stored objects are removed if the server returns soon.
            Otherwise object chunks remain that no object names.
        BusClosed: the connection was closed locally.
    """
    objects = f"{bucket}/{prefix}"
    split_objects(objects)
    files = await asyncio.to_thread(_find_files, folder)
    await ensure_bucket(nats, bucket, max_bytes=max_bytes)
    if await list_objects(nats, bucket, prefix):
        raise ControlError(ControlCode.STORAGE, f"objects:{objects} exists; delete it first, or use another prefix")
    if needed_bytes is not None:
        await _check_room(nats, bucket, folder, needed_bytes(await asyncio.to_thread(_bytes_of, folder, files)))
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
    logger.info("objects.uploaded objects=%s files=%s bytes=%s seconds=%.3f", objects, len(infos), size, seconds)
    return objects


async def _check_room(nats: Connection, bucket: str, folder: Path, needed: int) -> None:
    """Raise `storage` if the bucket has fewer than `needed` bytes left."""
    try:
        info = await ask(nats, f"STREAM.INFO.{stream_of(bucket)}")
    except ApiError as error:
        raise ControlError(ControlCode.STORAGE, f"the bucket {bucket!r} cannot be read: {error}") from error
    used, limit = info["state"]["bytes"], info["config"].get("max_bytes", -1)
    if 0 <= limit < used + needed:
        raise ControlError(
            ControlCode.STORAGE,
            f"{folder} needs {needed} bytes, and of the {limit} bytes of the bucket {bucket!r} {used} are used; an "
            "admin can enlarge it: rollbus make-queue MODEL --upload-bytes N",
        )


def _bytes_of(folder: Path, files: Iterable[str]) -> int:
    """Return the total size of the files. Skip a missing file, because the upload rejects it later."""
    num_bytes = 0
    for file in files:
        with contextlib.suppress(OSError):
            num_bytes += (folder / file).stat().st_size
    return num_bytes


def _find_files(folder: Path) -> list[str]:
    """Return the paths of the regular files below `folder`, relative to it."""

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
    """Delete stored objects, and wait for a lost connection to return. Log failures."""
    try:
        async with asyncio.timeout(CLEANUP_S):
            while not nats.is_closed:
                try:
                    await delete_objects(nats, bucket, infos)
                    return
                except BusBroken:
                    await asyncio.sleep(RETRY_S)
    except (TimeoutError, ControlError) as error:
        logger.warning("objects.cleanup_failed bucket=%s objects=%s error=%s", bucket, len(infos), error)
