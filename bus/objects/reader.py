"""Reads stored folders: each object separately, into memory or into a file.

`DIRECT.GET` returns the parts of an object in batches: the server sends the messages after a sequence number, up to a
number of bytes, and states how many remain. This requires no consumer. A user that may create consumers could make the
store deliver its content to any subject, because the subject is in the payload, which no permission checks.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec, TypeVar

import msgspec

from ...schemas.errors import BusBroken, BusClosed, LocalProtocolError, bad_source, storage_failure
from ..nats.connection import Connection, connected, publish, subscribe
from ..nats.jetstream import API, ApiError
from ..nats.library import Msg
from ..nats.library import errors as nats_errors
from ..nats.server import Server
from ..thread_calls import call_to_end
from .catalog import BucketState, bucket_state, list_prefix
from .layout import ObjectInfo, check_path, decode_digest, parts_subject, shown, split_objects, stream_of
from .writer import check_folder, folder_digest

logger = logging.getLogger(__name__)

READ_BYTES: Final = 4 * 1024**2
"""Bytes per read of a file that is hashed; larger reads are not faster."""
BATCH_BYTES: Final = 2 * 1024 * 1024
"""Bytes of one batch, which has at least one part. A batch delays the event loop's other work: concurrent round trips
take 3 ms (p99), and 10 ms with twice the size. The speed is the same from 1 to 8 MB."""
BATCHES: Final = 2
"""Number of batches in flight or buffered, so that data arrives while earlier data is written."""
SILENCE_S: Final = 2.0
"""Seconds without a message after which a batch counts as lost, with a restarted server or a broken connection."""
MAX_MISMATCHES: Final = 2
"""Consecutive mismatches between the server's number of parts and the description. A replica in a cluster may lag
once."""
RETRY_S: Final = 0.25
"""Seconds between attempts. A restarted server is back within tenths of a second."""
STALL_S: Final = 30.0
"""Seconds without a part after which the read fails."""
_NUMBERS: Final = ("Sequence", "Last-Sequence", "Num-Pending")
NOT_FOUND: Final = "404"
END_OF_BATCH: Final = "204"
BURST_S: Final = 0.25
"""Seconds of the rate that may pass at once after idle time, so that a busy event loop still reaches the rate."""
Args = ParamSpec("Args")
Result = TypeVar("Result")


class NewFile:
    """A file that is written and hashed. Its methods block. An existing file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.digest = hashlib.sha256()

    def open(self) -> None:
        """Create the file and its parent folders. An existing file is removed first, because it may be a link."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._file = self._path.open("xb", buffering=0)

    def write(self, parts: list[bytes]) -> None:
        """Append parts."""
        if self._file is None:
            raise LocalProtocolError(f"{self._path} is written before it is open")
        for part in parts:
            self.digest.update(part)
            rest = memoryview(part)
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        if self._file is not None:
            self._file.close()


def is_whole(path: Path, size: int, digest: bytes, on_read: Callable[[], None]) -> bool:
    """Return True if a regular file has this size and SHA-256. Read all of it, and call `on_read` after each part."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb", buffering=0) as file:
        if os.fstat(fd).st_size != size:
            return False
        sha = hashlib.sha256()
        while part := file.read(READ_BYTES):
            sha.update(part)
            on_read()
    return sha.digest() == digest


class _AttemptLost(Exception):
    """A batch or some of its messages were lost; the read continues with another attempt."""


async def read_parts(nats: Connection, info: ObjectInfo) -> AsyncGenerator[list[bytes], None]:
    """Yield the parts of an object in order, as many at a time as were received: at most `BATCHES * BATCH_BYTES`.

    The number of bytes and parts equals that in `info`. The caller checks the digest. Close the generator with
    `contextlib.aclosing` if it may be left early.

    Raises:
        ControlError: `bad_source`: the object differs from `info`, or was deleted meanwhile; `storage`: the server sent
            no part for `STALL_S`.
        BusClosed: the connection was closed locally.
    """
    progress = _ReadProgress(info)
    lost_at: float | None = None
    while not progress.is_complete:
        parts_before = progress.num_parts
        try:
            async with _attempt(nats, progress) as attempt:
                while not progress.is_complete:
                    yield await attempt.receive()
        except (_AttemptLost, BusBroken) as error:
            now = time.monotonic()
            if lost_at is None or progress.num_parts > parts_before:
                lost_at = now
            if now - lost_at > STALL_S:
                raise storage_failure(
                    f"{progress.shown} stopped for {STALL_S:g} s after {progress.so_far}: {error}"
                ) from error
            logger.warning(
                "objects.transfer_retried object=%s so_far=%r error=%s", progress.shown, progress.so_far, error
            )
            await asyncio.sleep(RETRY_S)


class _ReadProgress:
    """The progress of a read over all attempts."""

    def __init__(self, info: ObjectInfo) -> None:
        self.info = info
        self.shown = f"objects:{info.bucket}/{info.name}"
        self.num_parts = 0
        self.size = 0
        self.next_seq = 1
        """Sequence number in the stream from which parts are missing."""
        self._mismatches = 0

    @property
    def is_complete(self) -> bool:
        return self.num_parts == self.info.chunks

    @property
    def so_far(self) -> str:
        return f"{self.num_parts} of {self.info.chunks} parts"

    def check_missing(self, found: int) -> None:
        """Compare the number of parts that the server still has with the number that is missing here.

        Raises:
            _AttemptLost: they differ, for the first time.
            ControlError: `bad_source`: they differ again.
        """
        missing = self.info.chunks - self.num_parts
        if found == missing:
            self._mismatches = 0
            return
        self._mismatches += 1
        problem = f"{self.shown} has {found} more parts, expected {missing}: stored incompletely, or deleted meanwhile"
        if self._mismatches < MAX_MISMATCHES:
            raise _AttemptLost(problem)
        raise bad_source(problem)

    def add(self, part: bytes, seq: int) -> None:
        """Count a part, and reject a part that cannot belong to the object.

        Raises:
            ControlError: `bad_source`.
        """
        self.num_parts += 1
        self.size += len(part)
        self.next_seq = seq + 1
        if self.size > self.info.size or (self.is_complete and self.size != self.info.size):
            raise bad_source(
                f"{self.shown} has {self.size} bytes in {self.so_far}; its description says {self.info.size}"
            )


@contextlib.asynccontextmanager
async def _attempt(nats: Connection, progress: _ReadProgress) -> AsyncIterator["_Attempt"]:
    """Continue at `progress` with a new subscription."""
    attempt = _Attempt(nats, progress, nats.new_inbox())
    subscription = await subscribe(nats, attempt.inbox, attempt.on_message, max_pending_bytes=0)
    try:
        await attempt.ask(progress.next_seq)
        yield attempt
    finally:
        with contextlib.suppress(nats_errors.Error, BusBroken, BusClosed):
            await subscription.unsubscribe()


class _Attempt:
    """Consecutive batches. The number of requested batches bounds the buffered data."""

    def __init__(self, nats: Connection, progress: _ReadProgress, inbox: str) -> None:
        self.inbox = inbox
        self._nats = nats
        self._progress = progress
        info = progress.info
        self._get = f"{API}.DIRECT.GET.{stream_of(info.bucket)}"
        self._subject = parts_subject(info.bucket, info.nuid)
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue()
        self._num_whole = 0
        """Number of complete batches that wait here."""
        self._ask_from: int | None = None
        """Start of the next batch, which is requested after a waiting batch was read; None: it was requested."""
        self._last_seq = 0
        """Sequence number of the last part that was read from the current batch."""
        self._lost: _AttemptLost | BusBroken | None = None

    async def ask(self, seq: int) -> None:
        """Request the parts from this sequence number on."""
        self._ask_from = None
        question = {
            "seq": seq,
            "next_by_subj": self._subject,
            "batch": self._progress.info.chunks,
            "max_bytes": BATCH_BYTES,
        }
        await publish(self._nats, self._get, msgspec.json.encode(question), reply=self.inbox)

    async def on_message(self, message: Msg) -> None:
        """Handle a part or the end of a batch. At the end of a batch, request the next batch."""
        self._waiting.put_nowait(message)
        if (last_seq := _end_of_batch(message)) is not None:
            self._num_whole += 1
            if self._num_whole < BATCHES:
                await self.ask(last_seq + 1)
            else:
                self._ask_from = last_seq + 1

    async def receive(self) -> list[bytes]:
        """Return the received parts, at least one.

        Raises:
            _AttemptLost: no more parts will arrive.
            BusBroken, BusClosed: the errors of `publish`.
            ControlError: `bad_source`.
        """
        parts: list[bytes] = []
        while not parts:
            if self._lost is not None:
                raise self._lost
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await self._waiting.get()
            except TimeoutError:
                raise _AttemptLost(f"no message arrived for {SILENCE_S:g} s") from None
            try:
                await self._add(message, parts)
                while not self._waiting.empty():
                    await self._add(self._waiting.get_nowait(), parts)
            except (_AttemptLost, BusBroken) as error:
                self._lost = error  # the parts before the error are valid
        return parts

    async def _add(self, message: Msg, parts: list[bytes]) -> None:
        """Add a part to `parts`, or end a batch."""
        headers = message.headers or {}
        if _end_of_batch(message) is not None:
            self._num_whole -= 1
            self._last_seq = 0
            if self._ask_from is not None:
                await self.ask(self._ask_from)
        elif (status := headers.get("Status")) == NOT_FOUND:
            self._progress.check_missing(0)
        elif status is not None:
            raise _AttemptLost(f"the server answered {status} {headers.get('Description', '')}")
        elif self._progress.is_complete:
            return
        else:
            seq, last_seq, pending = (int(headers.get(f"Nats-{name}", -1)) for name in _NUMBERS)
            if last_seq != self._last_seq:
                raise _AttemptLost(f"messages after message {self._last_seq} were lost")
            self._progress.check_missing(pending + 1)
            self._last_seq = seq
            self._progress.add(message.data, seq)
            parts.append(message.data)


def _end_of_batch(message: Msg) -> int | None:
    """Return the number of a batch's last message if this is the end of the batch."""
    headers = message.headers or {}
    return int(headers.get("Nats-Last-Sequence", 0)) if headers.get("Status") == END_OF_BATCH else None


class TokenBucket:
    """Limits transfers to a rate. After idle time, the bytes of `BURST_S` may pass at once.

    Args:
        rate: bytes per second.
        now: seconds on a clock that only rises; all calls use the same clock.
    """

    def __init__(self, rate: int, now: float) -> None:
        self._rate = rate
        self._paid_until = now - BURST_S
        """Time at which the counted bytes would have passed at exactly the rate."""

    def spend(self, num_bytes: int, now: float) -> float:
        """Count passed bytes. Return the seconds to wait before more bytes may pass."""
        self._paid_until = max(self._paid_until, now - BURST_S) + num_bytes / self._rate
        return max(0.0, self._paid_until - now)


class FolderReader:
    """A stored folder, as of the time it was opened. Several reads may run at once.

    Attributes:
        objects: name of the folder: `<bucket>/<prefix>`.
        names: description of each object, by its path below the prefix. No path leads out of a folder.
        digest: digest of the content: the location, and the digest of each object.
    """

    def __init__(
        self,
        nats: Connection,
        objects: str,
        infos: tuple[ObjectInfo, ...],
        disk: ThreadPoolExecutor,
        rate: TokenBucket | None,
    ) -> None:
        _, prefix = split_objects(objects)
        self.objects: Final = objects
        self.names: Final[Mapping[str, ObjectInfo]] = {info.name.removeprefix(f"{prefix}/"): info for info in infos}
        self.digest: Final = folder_digest(objects, infos)
        for path in self.names:
            check_path(path, f"a file of objects:{objects}")
        # In this order, the first path below a file follows the file.
        for above, path in pairwise(sorted(f"{path}/" for path in self.names)):
            if path.startswith(above):
                where = f"has {path[:-1][:200]!r} below the file {above[:-1][:200]!r}"
                raise bad_source(f"objects:{objects} {where}; allowed: a relative path below no other file")
        self._nats = nats
        self._disk = disk
        self._rate = rate

    async def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of an object.

        Raises:
            ControlError: `bad_source`: the object is not in the folder, has more than `max_bytes`, or is damaged;
                `storage`: NATS failed.
        """
        info = self._info(name)
        if info.size > max_bytes:
            raise bad_source(f"{shown(info)} has {info.size} bytes; allowed: at most {max_bytes}")
        expected = decode_digest(info)
        async with contextlib.aclosing(self._parts(info)) as batches:
            data = b"".join([part async for parts in batches for part in parts])
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
        try:
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
        except OSError as error:
            where = f"{into}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            raise storage_failure(f"{shown(info)} cannot be written to {where}") from error
        _check_digest(info, file.digest, expected)

    async def bucket_state(self) -> BucketState:
        """Return the state of the bucket.

        Raises:
            ControlError: `storage`: NATS failed.
        """
        bucket, _ = split_objects(self.objects)
        with _nats_errors(f"the bucket {bucket!r} cannot be read"):
            return await bucket_state(self._nats, bucket)

    async def run(self, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Call a function on the disk thread. Calls run in order, even if a caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, lambda: function(*args, **kwargs))

    async def _parts(self, info: ObjectInfo) -> AsyncGenerator[list[bytes], None]:
        """Yield the parts of an object at the allowed rate."""
        with _nats_errors(f"{shown(info)} cannot be fetched"):
            async with contextlib.aclosing(read_parts(self._nats, info)) as batches:
                async for parts in batches:
                    yield parts
                    if self._rate is not None:
                        await asyncio.sleep(self._rate.spend(sum(map(len, parts)), time.monotonic()))

    def _info(self, name: str) -> ObjectInfo:
        info = self.names.get(name)
        if info is None:
            raise bad_source(f"objects:{self.objects} has no object {name[:200]!r}")
        return info


@contextlib.asynccontextmanager
async def open_reader(
    nats: Connection, objects: str, rate: TokenBucket | None = None, *, nice: int = 0
) -> AsyncIterator[FolderReader]:
    """Read the descriptions of a folder, and yield a reader of its objects.

    Args:
        rate: limit of the reads; None: no limit.
        nice: niceness of the disk thread; only on Linux.

    Raises:
        ControlError: `bad_source`: the folder has no objects, differs from the signed folder, or has a name that could
            lead out of it; `storage`.
        BusBroken: JetStream does not answer.
    """
    infos = await list_prefix(nats, objects, is_signed=True)
    if nats.signatures.are_demanded:
        check_folder(objects, infos)
    # One thread writes and then removes, even if the waiting task was cancelled.
    disk = ThreadPoolExecutor(1, thread_name_prefix="objects", initializer=_stand_back, initargs=(nice,))
    try:
        yield FolderReader(nats, objects, infos, disk, rate)
    finally:
        disk.shutdown(wait=False)


def _stand_back(nice: int) -> None:
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


@contextlib.contextmanager
def _nats_errors(failing: str) -> Iterator[None]:
    """Raise `storage`, with a message that begins with `failing`, if NATS fails in the block."""
    try:
        yield
    except (ApiError, BusBroken, BusClosed) as error:
        raise storage_failure(f"{failing}: {error}") from error


def _check_digest(info: ObjectInfo, sha: "hashlib._Hash", expected: bytes) -> None:
    if sha.digest() != expected:
        raise bad_source(
            f"{shown(info)} is damaged: its SHA-256 is {sha.hexdigest()}, the store's description says {expected.hex()}"
        )


class ObjectReader:
    """Opens folders. Each folder has its own connection, so that megabytes do not delay tokens.

    Args:
        server: server that stores the objects.
        name: name of the reading program, for the server's monitoring.
        fetch_rate: bytes per second, at least 1, over all concurrent fetches; None: no limit. When a fetch is slowed
            down, up to 4 MiB of its object may already be in flight.
        nice: nice value of the thread that hashes and writes. At most those 4 MiB arrive before the thread has written
            them, so the whole fetch is as slow as the thread.
    """

    def __init__(self, server: str | Server, *, name: str, fetch_rate: int | None = None, nice: int = 0) -> None:
        self._server = server
        self._name = name
        self._nice = nice
        self._rate = None if fetch_rate is None else TokenBucket(fetch_rate, time.monotonic())

    @contextlib.asynccontextmanager
    async def open_folder(self, objects: str) -> AsyncIterator[FolderReader]:
        """Open the folder `<bucket>/<prefix>` to read single objects of it.

        Raises:
            ControlError: `bad_source`: the folder has no objects, differs from the signed folder, or has a name that
                could lead out of it; `storage`: NATS failed.
        """
        split_objects(objects)
        async with contextlib.AsyncExitStack() as stack:
            with _nats_errors(f"objects:{objects} cannot be fetched"):
                nats = await stack.enter_async_context(connected(self._server, name=f"{self._name}-objects"))
                folder = await stack.enter_async_context(open_reader(nats, objects, self._rate, nice=self._nice))
            yield folder
