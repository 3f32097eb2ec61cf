"""Stores the chunks of an object from a file or from memory, without its description."""

import asyncio
import contextlib
import hashlib
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ...schemas.errors import ControlCode, ControlError, LocalProtocolError
from .layout import ObjectInfo, ObjectOptions, encode_digest, parts_subject
from .sender import WINDOW_BYTES, Sender

__all__ = ["Pieces", "each_piece", "put_file", "put_pieces"]

Bytes = bytes | bytearray | memoryview
Pieces = AsyncIterable[Bytes] | Iterable[Bytes]
"""Content of an object, split at any positions."""


async def put_file(sender: Sender, info: ObjectInfo, path: Path) -> ObjectInfo:
    """Store the content of a file. Return the object's description.

    Raises:
        ControlError: `bad_source`: the file cannot be read; and as in `put_pieces`.
    """
    sha = hashlib.sha256()
    try:
        async with contextlib.aclosing(_parts_of_file(path, sender.part_bytes, sha)) as batches:
            return await _put(sender, info, batches, sha)
    except OSError as error:
        raise ControlError(ControlCode.BAD_SOURCE, f"{path} cannot be read: {error.strerror or error}") from error


async def put_pieces(sender: Sender, info: ObjectInfo, pieces: Pieces) -> ObjectInfo:
    """Store the content of `pieces` as one object. Return its description.

    At most one window and one piece are in memory. Hashes are computed in a thread.

    Raises:
        ControlError: `storage`: the bucket is full.
        BusBroken, BusClosed: the errors of `publish`.
    """
    sha = hashlib.sha256()
    async with contextlib.aclosing(_parts_of_pieces(pieces, sender.part_bytes, sha)) as batches:
        return await _put(sender, info, batches, sha)


async def _put(
    sender: Sender, info: ObjectInfo, batches: AsyncIterable[list[bytes]], sha: "hashlib._Hash"
) -> ObjectInfo:
    subject = parts_subject(info.bucket, info.nuid)
    size = chunks = 0
    async for parts in batches:
        for part in parts:
            await sender.send(subject, part)
            size, chunks = size + len(part), chunks + 1
    return msgspec.structs.replace(
        info,
        size=size,
        chunks=chunks,
        digest=encode_digest(sha.digest()),
        mtime=datetime.now(UTC).isoformat(),
        options=ObjectOptions(max_chunk_size=sender.part_bytes),
    )


async def _parts_of_file(path: Path, part_bytes: int, sha: "hashlib._Hash") -> AsyncGenerator[list[bytes], None]:
    # One thread reads and closes the file in that order, even if the wait for the thread was cancelled.
    disk = ThreadPoolExecutor(1, thread_name_prefix="objects")
    run = asyncio.get_running_loop().run_in_executor
    file = _OldFile(path, part_bytes, sha)
    try:
        await run(disk, file.open)
        while parts := await run(disk, file.read):
            yield parts
    finally:
        await run(disk, file.close)
        disk.shutdown(wait=False)


async def _parts_of_pieces(pieces: Pieces, part_bytes: int, sha: "hashlib._Hash") -> AsyncGenerator[list[bytes], None]:
    """Cut the pieces into chunks of `part_bytes`, except for the last one. Yield the chunks of one window at a time."""
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


class _OldFile:
    """A file that is read and hashed. Its methods block."""

    def __init__(self, path: Path, part_bytes: int, sha: "hashlib._Hash") -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._fd: int | None = None
        self._sha = sha

    def open(self) -> None:
        """Open the file. Reject a pipe, because a read from it could block forever."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ControlError(ControlCode.BAD_SOURCE, f"{self._path} is no regular file")

    def read(self) -> list[bytes]:
        """Return the chunks of one window; an empty list at the end of the file."""
        if self._fd is None:
            raise LocalProtocolError(f"{self._path} is read before it is open")
        parts = []
        for _ in range(max(1, WINDOW_BYTES // self._part_bytes)):
            part = os.read(self._fd, self._part_bytes)
            if not part:
                break
            self._sha.update(part)
            parts.append(part)
        return parts

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
