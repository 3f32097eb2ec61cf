"""Stores a folder in the object store completely or not at all.

Each object's description is signed, and has the digest of the whole folder. Only a user that may sign can therefore
change, add or remove a file. See `rollbus.bus.auth.credentials`.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from ...schemas.errors import BusBroken, ControlError, RollbusError, bad_source, storage_failure
from ..nats.client import PatchedNatsClient
from ..nats.connection import Connection, publish, subscribe
from ..nats.jetstream import put, storage_errors
from ..nats.library import NUID, Client, Msg
from ..nats.library import errors as nats_errors
from ..protocol.fleet.authority import check_unlimited
from ..thread_calls import call_to_end, is_set_within
from .catalog import (
    BUCKET_BYTES,
    bucket_state,
    delete_objects,
    describe_object,
    ensure_bucket,
    list_objects,
    list_prefix,
)
from .layout import (
    FOLDER_DIGEST,
    MAX_FILES,
    ObjectInfo,
    ObjectOptions,
    check_path,
    encode_digest,
    parts_subject,
    split_objects,
)

logger = logging.getLogger(__name__)

PART_BYTES: Final = 512 * 1024
"""Bytes of a part, if the server's `max_payload` allows it. Larger parts are not faster and delay other messages."""
HEADROOM_BYTES: Final = 4096
"""Bytes below `max_payload` for headers that an intermediate server may add."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Published bytes without an ack: enough to keep the server busy, few enough not to delay other messages."""
ACK_TIMEOUT_S: Final = 10.0
"""Seconds for the server to store a part; a slow disk or an election takes seconds."""
Bytes = bytes | bytearray | memoryview
Pieces = AsyncIterable[Bytes] | Iterable[Bytes]
"""Content of an object, split at any positions."""
CLEANUP_S: Final = 15.0
"""Seconds for removing the objects of a failed upload; a restarted server is back within that time."""
RETRY_S: Final = 0.5
"""Seconds between attempts to remove them."""


class Sender:
    """Publishes messages to a stream and keeps several of them in flight."""

    def __init__(self, nats: PatchedNatsClient, inbox: str) -> None:
        self.part_bytes = min(PART_BYTES, nats.max_payload - HEADROOM_BYTES)
        self._nats = nats
        self._inbox = inbox
        self._window = max(1, WINDOW_BYTES // self.part_bytes)
        self._unacked = 0
        self._acked = asyncio.Event()
        self._failure: RollbusError | None = None

    def on_ack(self, message: Msg) -> None:
        """Handle the server's ack of one message."""
        self._unacked -= 1
        self._failure = self._failure or _refusal(message)
        self._acked.set()

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish a message once the window has room."""
        await self._wait_until(self._window - 1)
        if self._failure is not None:
            raise self._failure
        self._unacked += 1
        await publish(self._nats, subject, data, reply=self._inbox, headers=headers)

    async def finish(self) -> None:
        """Wait until all messages are stored."""
        await self._wait_until(0)
        if self._failure is not None:
            raise self._failure

    async def settle(self) -> None:
        """Wait until the server has processed all messages. It stores none of them after a later delete."""
        if not isinstance(self._failure, BusBroken):
            await self._wait_until(0)

    async def _wait_until(self, unacked: int) -> None:
        while self._unacked > unacked:
            self._acked.clear()
            if not await is_set_within(self._acked, ACK_TIMEOUT_S):
                self._failure = BusBroken(f"JetStream did not store a part within {ACK_TIMEOUT_S:g} s")
                return


@contextlib.asynccontextmanager
async def open_sender(nats: Connection) -> AsyncIterator[Sender]:
    """Open a sender for a block. At the end of the block, the server has processed all messages."""
    inbox = nats.new_inbox()
    sender = Sender(nats, inbox)
    subscription = await subscribe(nats, inbox, sender.on_ack)
    try:
        yield sender
    finally:
        await sender.settle()
        with contextlib.suppress(nats_errors.Error):  # the connection is closed
            await subscription.unsubscribe()


def _refusal(message: Msg) -> ControlError | None:
    """Return the reason why the server did not store a message; None: it stored the message."""
    answer: dict[str, Any] = json.loads(message.data) if message.data else {"error": {"description": "no such bucket"}}
    if "error" not in answer:
        return None
    return storage_failure(f"the bucket rejected the upload: {answer['error'].get('description', '')}")


def folder_digest(objects: str, infos: Iterable[ObjectInfo]) -> str:
    """Return the digest of a folder: its location and the digest of each file."""
    _, prefix = split_objects(objects)
    files = sorted((info.name.removeprefix(f"{prefix}/"), info.size, info.digest) for info in infos)
    lines = [objects, *(f"{path} {size} {digest}" for path, size, digest in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def describe_folder(objects: str, infos: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the descriptions with the digest of the folder."""
    infos = list(infos)
    metadata = {FOLDER_DIGEST: folder_digest(objects, infos)}
    return [msgspec.structs.replace(info, metadata=metadata) for info in infos]


async def store_folder(nats: Connection, sender: Sender, objects: str, infos: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Store the descriptions of a folder whose content was sent, signed if this program signs. Return them.

    The last description is stored after all others. From then on, readers find the whole folder.

    Raises:
        ControlError: `storage`: the bucket is full.
        BusBroken: the connection or JetStream failed; some descriptions may be stored.
    """
    infos = list(infos) if nats.signatures.own is None else describe_folder(objects, infos)
    await sender.finish()
    for some in (infos[:-1], infos[-1:]):
        for info in some:
            await sender.send(*describe_object(nats, info))
        await sender.finish()
    return infos


def check_folder(objects: str, infos: Iterable[ObjectInfo]) -> None:
    """Check that a folder of signed descriptions is complete.

    Raises:
        ControlError: `bad_source`.
    """
    infos = list(infos)
    digest = folder_digest(objects, infos)
    for info in infos:
        if info.metadata.get(FOLDER_DIGEST) != digest:
            raise bad_source(
                f"objects:{objects} is not the folder that was signed: a file was changed, added or removed since"
            )


async def sign_folder(nats: Connection, objects: str) -> int:
    """Sign a stored folder without a check of its author. Return its number of objects.

    Raises:
        ControlError: `bad_source`: the folder has no objects; `not_allowed`; `storage`.
        BusBroken: JetStream does not answer; some objects may be signed.
    """
    check_unlimited(nats.signatures.own)
    infos = describe_folder(objects, await list_prefix(nats, objects, is_signed=False))
    for info in infos:
        with storage_errors(f"objects:{objects} cannot be signed"):
            await put(nats, *describe_object(nats, info))
    return len(infos)


async def put_file(sender: Sender, info: ObjectInfo, path: Path) -> ObjectInfo:
    """Store the content of a file. Return the object's description.

    Raises:
        ControlError: `bad_source`: the file cannot be read; and as in `put_pieces`.
    """
    windows = _read_windows(path)

    async def pieces() -> AsyncGenerator[bytes, None]:
        while piece := await call_to_end(next, windows, b""):
            yield piece

    try:
        return await put_pieces(sender, info, pieces())
    except OSError as error:
        raise bad_source(f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        await call_to_end(windows.close)


def _read_windows(path: Path) -> Generator[bytes, None, None]:
    """Yield the content of a file, one window at a time. This blocks."""
    # Without O_NONBLOCK, opening a pipe could block forever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise bad_source(f"{path} is no regular file")
        yield from iter(partial(os.read, fd, WINDOW_BYTES), b"")
    finally:
        os.close(fd)


async def put_pieces(sender: Sender, info: ObjectInfo, pieces: Pieces) -> ObjectInfo:
    """Store the content of `pieces` as one object. Return its description.

    At most one window and one piece are in memory. Hashes are computed in a thread.

    Raises:
        ControlError: `storage`: the bucket is full.
        BusBroken, BusClosed: the errors of `publish`.
    """
    subject, sha = parts_subject(info.bucket, info.nuid), hashlib.sha256()
    size = num_parts = 0
    async with contextlib.aclosing(_parts_of(pieces, sender.part_bytes, sha)) as batches:
        async for parts in batches:
            for part in parts:
                await sender.send(subject, part)
                size, num_parts = size + len(part), num_parts + 1
    return msgspec.structs.replace(
        info,
        size=size,
        chunks=num_parts,
        digest=encode_digest(sha.digest()),
        mtime=datetime.now(UTC).isoformat(),
        options=ObjectOptions(max_chunk_size=sender.part_bytes),
    )


async def _parts_of(pieces: Pieces, part_bytes: int, sha: "hashlib._Hash") -> AsyncGenerator[list[bytes], None]:
    """Cut the pieces into parts of `part_bytes`, except for the last one. Yield the parts of one window at a time."""
    batch_bytes = max(1, WINDOW_BYTES // part_bytes) * part_bytes
    rest = bytearray()
    async with contextlib.aclosing(each_piece(pieces)) as given:
        async for piece in given:
            view = memoryview(piece).cast("B")
            while view:
                taken = view[: batch_bytes - len(rest)]
                rest += taken
                view = view[len(taken) :]
                if len(rest) == batch_bytes:
                    yield await asyncio.to_thread(_cut, rest, part_bytes, sha)
                    rest = bytearray()
    if rest:
        yield await asyncio.to_thread(_cut, rest, part_bytes, sha)


def _cut(batch: bytearray, part_bytes: int, sha: "hashlib._Hash") -> list[bytes]:
    sha.update(batch)
    return [bytes(batch[start : start + part_bytes]) for start in range(0, len(batch), part_bytes)]


async def each_piece(pieces: Pieces) -> AsyncGenerator[Bytes, None]:
    """Yield the pieces of either kind of iterable. Close an asynchronous generator at the end."""
    if not isinstance(pieces, AsyncIterable):
        for piece in pieces:
            yield piece
        return
    try:
        async for piece in pieces:
            yield piece
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


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
            Otherwise object parts remain that no object names.
        BusClosed: the connection was closed locally.
    """
    objects = f"{bucket}/{prefix}"
    split_objects(objects)
    files = await asyncio.to_thread(_find_files, folder)
    await ensure_bucket(nats, bucket, max_bytes=max_bytes)
    if await list_objects(nats, bucket, prefix):
        raise storage_failure(f"objects:{objects} exists; delete it first, or use another prefix")
    if needed_bytes is not None:
        await _check_room(nats, bucket, folder, needed_bytes(await asyncio.to_thread(_bytes_of, folder, files)))
    started = time.monotonic()
    infos: list[ObjectInfo] = []
    nuid = NUID()
    try:
        async with open_sender(nats) as sender:
            for path in files:
                infos.append(ObjectInfo(name=f"{prefix}/{path}", bucket=bucket, nuid=nuid.next().decode()))
                infos[-1] = await put_file(sender, infos[-1], folder / path)
            await store_folder(nats, sender, objects, infos)
    except BaseException:
        await delete_stored(nats, bucket, tuple(infos))
        raise
    size, seconds = sum(info.size for info in infos), time.monotonic() - started
    logger.info("objects.uploaded objects=%s files=%s bytes=%s seconds=%.3f", objects, len(infos), size, seconds)
    return objects


async def _check_room(nats: Connection, bucket: str, folder: Path, needed: int) -> None:
    """Raise `storage` if the bucket has fewer than `needed` bytes left."""
    with storage_errors(f"the bucket {bucket!r} cannot be read"):
        used, limit, _ = await bucket_state(nats, bucket)
    if limit < used + needed:
        raise storage_failure(
            f"{folder} needs {needed} bytes, and of the {limit} bytes of the bucket {bucket!r} {used} are used; an "
            "admin can enlarge it: rollbus make-queue MODEL --upload-bytes N"
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
        raise bad_source(f"{error.filename} cannot be read: {error.strerror}") from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
        if len(files) > MAX_FILES:
            raise bad_source(f"{folder} has more than {MAX_FILES} files")
    if not files:
        raise bad_source(f"{folder} has no files")
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
