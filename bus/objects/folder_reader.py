"""Reader of one stored folder: it reads each object separately, into memory or into a file."""

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from ...schemas.errors import BusBroken, BusClosed, ControlCode, ControlError
from ..nats.connection import Connection
from ..nats.jetstream import ApiError
from ..thread_calls import call_to_end
from .catalog import BucketState, bucket_state, list_prefix
from .layout import ObjectInfo, check_path, decode_digest, split_objects
from .new_file import NewFile, is_whole, reason
from .object_chunks import read_object_chunks
from .signed import check_folder, folder_digest
from .token_bucket import TokenBucket

__all__ = ["FolderReader", "open_reader"]

Args = ParamSpec("Args")
Result = TypeVar("Result")

Pace = Callable[[int], Awaitable[None]]
"""Called with the number of received bytes; returns when more bytes may be received."""


class FolderReader:
    """A stored folder, as of the time it was opened. Several reads may run at once.

    Attributes:
        objects: name of the folder: `<bucket>/<prefix>`.
        names: description of each object, by its path below the prefix. No path leads out of a folder.
        digest: digest of the content: the location, and the digest of each object.
    """

    def __init__(
        self, nats: Connection, objects: str, infos: tuple[ObjectInfo, ...], disk: ThreadPoolExecutor, pace: Pace
    ) -> None:
        _, prefix = split_objects(objects)
        self.objects: Final = objects
        self.names: Final[Mapping[str, ObjectInfo]] = {info.name.removeprefix(f"{prefix}/"): info for info in infos}
        self.digest: Final = folder_digest(objects, infos)
        for path in self.names:
            check_path(path, f"a file of objects:{objects}")
        self._nats = nats
        self._disk = disk
        self._pace = pace

    def __repr__(self) -> str:
        """One line with the folder."""
        return f"<FolderReader {self.objects} files={len(self.names)}>"

    async def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of an object.

        Raises:
            ControlError: `bad_source`: the object is not in the folder, has more than `max_bytes`, or is damaged;
                `storage`: NATS failed.
        """
        info = self._info(name)
        if info.size > max_bytes:
            raise ControlError(
                ControlCode.BAD_SOURCE, f"{_shown(info)} has {info.size} bytes; allowed: at most {max_bytes}"
            )
        expected = decode_digest(info)
        content = bytearray()
        async with contextlib.aclosing(self._parts(info)) as batches:
            async for parts in batches:
                for part in parts:
                    content += part
        data = bytes(content)
        _check_digest(info, await self.run(hashlib.sha256, data), expected)
        return data

    async def fetch(self, name: str, into: Path, on_bytes: Callable[[int], None]) -> None:
        """Write an object to the file `into`, unless the file already has its size and SHA-256.

        The disk thread writes and hashes while more bytes arrive. If this call fails or is cancelled, a partial file
        may remain, and the next call replaces it.

        Args:
            into: a file that only this process uses; missing parent folders are created.
            on_bytes: called repeatedly with the number of received bytes. While an existing file is read, it is called
                with 0 on the disk thread.

        Raises:
            ControlError: `bad_source`: the object is not in the folder, or is damaged; `storage`: NATS or the disk
                failed.
        """
        info = self._info(name)
        expected = decode_digest(info)
        with _disk_errors(info, into):
            if await self.run(is_whole, into, info.size, expected, lambda: on_bytes(0)):
                return
            file = NewFile(into)
            try:
                await self.run(file.open)
                async with contextlib.aclosing(self._parts(info)) as batches:
                    async for parts in batches:
                        await self.run(file.write, parts)
                        on_bytes(sum(map(len, parts)))
            finally:
                # A cancelled call that the thread had not begun would leave the file open.
                await call_to_end(file.close, executor=self._disk)
        _check_digest(info, file.digest, expected)

    async def bucket_state(self) -> BucketState:
        """Return the state of the bucket.

        Raises:
            ControlError: `storage`: NATS failed.
        """
        bucket, _ = split_objects(self.objects)
        try:
            return await bucket_state(self._nats, bucket)
        except (ApiError, BusBroken, BusClosed) as error:
            raise ControlError(ControlCode.STORAGE, f"the bucket {bucket!r} cannot be read: {error}") from error

    async def run(self, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Call a function on the disk thread. Calls run in order, even if a caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, lambda: function(*args, **kwargs))

    async def _parts(self, info: ObjectInfo) -> AsyncGenerator[list[bytes], None]:
        """Yield the chunks of an object at the allowed rate."""
        try:
            async with contextlib.aclosing(read_object_chunks(self._nats, info)) as batches:
                async for parts in batches:
                    yield parts
                    await self._pace(sum(map(len, parts)))
        except (BusBroken, BusClosed) as error:
            raise ControlError(ControlCode.STORAGE, f"{_shown(info)} cannot be fetched: {error}") from error

    def _info(self, name: str) -> ObjectInfo:
        info = self.names.get(name)
        if info is None:
            raise ControlError(ControlCode.BAD_SOURCE, f"objects:{self.objects} has no object {name[:200]!r}")
        return info


@contextlib.asynccontextmanager
async def open_reader(
    nats: Connection, objects: str, rate: TokenBucket | None, *, nice: int = 0
) -> AsyncIterator[FolderReader]:
    """Read the descriptions of a folder, and yield a reader of its objects.

    Args:
        nice: niceness of the disk thread; only on Linux.

    Raises:
        ControlError: `bad_source`: the folder has no objects, differs from the signed folder, or has a name that could
            lead out of it; `storage`.
        BusBroken: JetStream does not answer.
    """

    async def pace(num_bytes: int) -> None:
        if rate is not None:
            await asyncio.sleep(rate.spend(num_bytes, time.monotonic()))

    infos = await list_prefix(nats, objects, is_signed=True)
    if nats.signatures.are_demanded:
        check_folder(objects, infos)
    # One thread writes and then removes, even if the waiting task was cancelled.
    disk = ThreadPoolExecutor(1, thread_name_prefix="objects", initializer=_stand_back, initargs=(nice,))
    try:
        yield FolderReader(nats, objects, infos, disk, pace)
    finally:
        disk.shutdown(wait=False)


def _stand_back(nice: int) -> None:
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


@contextlib.contextmanager
def _disk_errors(info: ObjectInfo, into: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ControlError(
            ControlCode.STORAGE, f"{_shown(info)} cannot be written to {into}: {reason(error)}"
        ) from error


def _check_digest(info: ObjectInfo, sha: "hashlib._Hash", expected: bytes) -> None:
    if sha.digest() != expected:
        raise ControlError(
            ControlCode.BAD_SOURCE,
            f"{_shown(info)} is damaged: its SHA-256 is {sha.hexdigest()}, the store's description says "
            f"{expected.hex()}",
        )


def _shown(info: ObjectInfo) -> str:
    return f"objects:{info.bucket}/{info.name}"
