"""Putting a folder into the object store: all of it, or nothing."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.nuid import NUID

from ...schemas.errors import BusBroken, ControlCode, ControlError, LocalProtocolError, RollbusError
from ..nats.connection import Connection, publish, subscribe
from .catalog import BUCKET_BYTES, delete_objects, ensure_bucket, list_objects
from .layout import (
    MAX_FILES,
    ObjectInfo,
    ObjectOptions,
    check_path,
    encode_digest,
    info_subject,
    parts_subject,
    split_objects,
)
from .signed import describe_folder

__all__ = ["put_folder"]

logger = logging.getLogger(__name__)

PART_BYTES: Final = 512 * 1024
"""Of a part, where the server's `max_payload` allows it: larger ones move no faster, and hold up others."""
HEADROOM_BYTES: Final = 4096
"""Below `max_payload`, for headers that a server in between may add."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Published and not acknowledged yet: enough to keep the server busy, little enough not to hold up other messages."""
ACK_TIMEOUT_S: Final = 10.0
"""For the server to store a part: seconds on a slow disk or in an election."""
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
        async with _sender(nats) as sender:
            for path in files:
                infos.append(ObjectInfo(name=f"{prefix}/{path}", bucket=bucket, nuid=nuid.next().decode()))
                infos[-1] = await _put_parts(sender, infos[-1], folder / path)
            await sender.finish()
            if nats.signatures.own is not None:
                infos = describe_folder(objects, infos)
            for info in infos:  # from here on the objects are there
                subject, data = info_subject(bucket, info.name), msgspec.json.encode(info)
                await sender.send(subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)})
            await sender.finish()
        is_stored = True
    finally:
        if not is_stored:
            await _delete_stored(nats, bucket, tuple(infos))
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


class _Sender:
    """Publishes messages to a stream, of which some are unacknowledged at any time."""

    def __init__(self, nats: Client, inbox: str) -> None:
        self.part_bytes = min(PART_BYTES, nats.max_payload - HEADROOM_BYTES)
        self._nats = nats
        self._inbox = inbox
        self._window = max(1, WINDOW_BYTES // self.part_bytes)
        self._unacked = 0
        self._acked = asyncio.Event()
        self._failure: RollbusError | None = None

    async def on_ack(self, message: Msg) -> None:
        """Take the server's word on one message."""
        self._unacked -= 1
        self._failure = self._failure or _refusal(message)
        self._acked.set()

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish a message, when there is room in the window."""
        await self._wait_until(self._window - 1)
        if self._failure is not None:
            raise self._failure
        self._unacked += 1
        await publish(self._nats, subject, data, reply=self._inbox, headers=headers)

    async def finish(self) -> None:
        """Wait until all are stored."""
        await self._wait_until(0)
        if self._failure is not None:
            raise self._failure

    async def settle(self) -> None:
        """Wait until the server has dealt with all: what is deleted then is not stored afterwards."""
        if not isinstance(self._failure, BusBroken):
            await self._wait_until(0)

    async def _wait_until(self, unacked: int) -> None:
        while self._unacked > unacked:
            self._acked.clear()
            try:
                async with asyncio.timeout(ACK_TIMEOUT_S):
                    await self._acked.wait()
            except TimeoutError:
                self._failure = BusBroken(f"JetStream did not store a part within {ACK_TIMEOUT_S:g} s")
                return


@contextlib.asynccontextmanager
async def _sender(nats: Client) -> AsyncIterator[_Sender]:
    inbox = nats.new_inbox()
    sender = _Sender(nats, inbox)
    subscription = await subscribe(nats, inbox, sender.on_ack)
    try:
        yield sender
    finally:
        await sender.settle()
        with contextlib.suppress(nats_errors.Error):  # the connection is closed
            await subscription.unsubscribe()


async def _put_parts(sender: _Sender, info: ObjectInfo, path: Path) -> ObjectInfo:
    """Store the content of a file; return its description."""
    subject = parts_subject(info.bucket, info.nuid)
    size = chunks = 0
    # One thread reads and closes, in that order, also when the waiting for it was cancelled.
    disk = ThreadPoolExecutor(1, thread_name_prefix="objects")
    run = asyncio.get_running_loop().run_in_executor
    file = _OldFile(path, sender.part_bytes)
    try:
        await run(disk, file.open)
        while parts := await run(disk, file.read):
            for part in parts:
                await sender.send(subject, part)
                size, chunks = size + len(part), chunks + 1
    except OSError as error:
        raise ControlError(ControlCode.BAD_SOURCE, f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        await run(disk, file.close)
        disk.shutdown(wait=False)
    return msgspec.structs.replace(
        info,
        size=size,
        chunks=chunks,
        digest=encode_digest(file.digest.digest()),
        mtime=datetime.now(UTC).isoformat(),
        options=ObjectOptions(max_chunk_size=sender.part_bytes),
    )


class _OldFile:
    """A file that is read and hashed; its methods block."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._fd: int | None = None
        self.digest = hashlib.sha256()

    def open(self) -> None:
        """Open it, but no pipe, which could make us wait for ever."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ControlError(ControlCode.BAD_SOURCE, f"{self._path} is no regular file")

    def read(self) -> list[bytes]:
        """Return a window's worth of parts; none at the end."""
        if self._fd is None:
            raise LocalProtocolError(f"{self._path} is read before it is open")
        parts = []
        for _ in range(max(1, WINDOW_BYTES // self._part_bytes)):
            part = os.read(self._fd, self._part_bytes)
            if not part:
                break
            self.digest.update(part)
            parts.append(part)
        return parts

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _refusal(message: Msg) -> ControlError | None:
    """Return why the server did not store a message; None: it did."""
    answer: dict[str, Any] = json.loads(message.data) if message.data else {"error": {"description": "no such bucket"}}
    if "error" not in answer:
        return None
    return ControlError(ControlCode.STORAGE, f"the bucket takes no more: {answer['error'].get('description', '')}")


async def _delete_stored(nats: Client, bucket: str, infos: tuple[ObjectInfo, ...]) -> None:
    """Delete what was stored; a connection that broke may come back for it."""
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
