"""The parts of one object, read at the connection's speed: in order, each once, however often the connection breaks.

nats-py's own reader waits a quarter of a second whenever the server asks whether it follows, and so manages 20 MB/s.
Here a pull consumer brings them: two pulls stand at the server, each for `PULL_BYTES`, and when one has ended and all
that it brought has been taken, the next is asked for. So memory is bounded, and the server hardly waits.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import msgspec
from nats import errors as nats_errors
from nats.aio.msg import Msg

from bus.connection import Connection, publish, subscribe
from bus.jetstream import API, ApiError, ask, nanoseconds
from bus.objects.layout import ObjectInfo, parts_subject, stream_of
from schemas.errors import BusBroken, BusClosed, ControlCode, ControlError

__all__ = ["read_parts"]

logger = logging.getLogger(__name__)

PULL_BYTES: Final = 2 * 1024 * 1024
"""Of one pull, or one part where parts are larger. What comes at once holds up the event loop's other work: round trips
beside it take 3 ms (p99), 10 with twice the size; the speed is the same from 1 to 8 MB."""
PULLS: Final = 2
"""That stand at the server, which serves them in turns: more comes while something is written."""
MAX_PART_BYTES: Final = 64 * 1024 * 1024
"""No server takes larger messages, whatever a description says."""
OVERHEAD_BYTES: Final = 64 * 1024
"""Of a message beyond `max_payload`, in the server's count: its subjects."""
EXPIRES_S: Final = 30.0
"""Of a pull: far longer than one takes."""
HEARTBEAT_S: Final = 0.5
"""The server says so often that it has nothing to say."""
SILENCE_S: Final = 2.0
"""Without a word the consumer is gone, with a server that was restarted or a connection that broke."""
MAX_IDLE_HEARTBEATS: Final = 4
"""In a row: the server has nothing more to send, though parts are missing. The next attempt finds out why."""
RETRY_S: Final = 0.25
"""Between attempts: a restarted server is back within tenths of a second."""
STALL_S: Final = 30.0
"""Without a single part the reading fails."""


class _AttemptLost(Exception):
    """The consumer is gone, or messages of it were lost: the reading goes on with another one."""


async def read_parts(nats: Connection, info: ObjectInfo) -> AsyncGenerator[list[bytes], None]:
    """Yield the parts of an object, in order, as many at a time as are there: `PULLS * PULL_BYTES` at most.

    More is asked for when the next are asked for. They are as many bytes and parts as `info` says; the digest is the
    caller's to check. Close it (`contextlib.aclosing`) where it may be left early.

    Raises:
        ControlError: `bad_source`: the object is not what `info` says, or was deleted meanwhile; `storage`: the server
            sends nothing for `STALL_S`.
        BusClosed: the connection was closed here.
    """
    progress = _Progress(info)
    lost_at: float | None = None
    while not progress.is_complete:
        parts_before = progress.parts
        try:
            async with _attempt(nats, progress) as attempt:
                while not progress.is_complete:
                    yield await attempt.take()
        except (_AttemptLost, BusBroken) as error:
            now = time.monotonic()
            if lost_at is None or progress.parts > parts_before:
                lost_at = now
            if now - lost_at > STALL_S:
                raise ControlError(
                    ControlCode.STORAGE, f"{progress.shown} stopped for {STALL_S:g} s after {progress.so_far}: {error}"
                ) from error
            logger.warning("objects.retry object=%s so_far=%r error=%s", progress.shown, progress.so_far, error)
            await asyncio.sleep(RETRY_S)


class _Progress:
    """What has been read of an object, over all attempts."""

    def __init__(self, info: ObjectInfo) -> None:
        self.info = info
        self.shown = f"objects:{info.bucket}/{info.name}"
        self.parts = 0
        self.size = 0
        self.next_seq = 1
        """The stream's number from which on parts are missing."""

    @property
    def is_complete(self) -> bool:
        return self.parts == self.info.chunks

    @property
    def so_far(self) -> str:
        return f"{self.parts} of {self.info.chunks} parts"

    def add(self, part: bytes, seq: int) -> None:
        """Count a part; refuse one that the object cannot have.

        Raises:
            ControlError: `bad_source`.
        """
        self.parts += 1
        self.size += len(part)
        self.next_seq = seq + 1
        if self.size > self.info.size or (self.is_complete and self.size != self.info.size):
            raise ControlError(
                ControlCode.BAD_SOURCE,
                f"{self.shown} has {self.size} bytes in {self.so_far}; its description says {self.info.size}",
            )


@contextlib.asynccontextmanager
async def _attempt(nats: Connection, progress: _Progress) -> AsyncIterator["_Attempt"]:
    """Make a consumer that goes on where `progress` is, ask for the first parts, and delete it on leaving."""
    info = progress.info
    stream = stream_of(info.bucket)
    inbox = nats.new_inbox()
    config = {
        "filter_subject": parts_subject(info.bucket, info.nuid),
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": progress.next_seq,
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": nanoseconds(EXPIRES_S),  # the server deletes it where this side cannot
    }
    try:
        answer = await ask(nats, f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
    except ApiError as error:
        raise _AttemptLost(str(error)) from error
    missing = info.chunks - progress.parts
    if answer["num_pending"] != missing:
        raise ControlError(
            ControlCode.BAD_SOURCE,
            f"{progress.shown} has {answer['num_pending']} parts where {missing} are missing: stored incompletely, or "
            "deleted meanwhile",
        )
    attempt = _Attempt(nats, progress, f"{API}.CONSUMER.MSG.NEXT.{stream}.{answer['name']}", inbox)
    subscription = await subscribe(nats, f"{inbox}.*", attempt.on_message, max_pending_bytes=0)
    try:
        for _ in range(PULLS):
            await attempt.pull()
        yield attempt
    finally:
        with contextlib.suppress(nats_errors.Error, BusBroken, BusClosed):  # without a connection the server cleans up
            await subscription.unsubscribe()
            await publish(nats, f"{API}.CONSUMER.DELETE.{stream}.{answer['name']}", b"")


class _Attempt:
    """One consumer's messages. What waits is bounded by the pulls that were asked for."""

    def __init__(self, nats: Connection, progress: _Progress, pull_subject: str, inbox: str) -> None:
        self._nats = nats
        self._progress = progress
        self._pull_subject = pull_subject
        self._inbox = inbox
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue()
        self._pulls = 0
        self._consumer_seq = 0
        self._asked_at: dict[str, int] = {}
        """For each pull that stands, how far this was; one that ends with nothing more would end so for ever."""
        self._idle_heartbeats = 0
        self._lost: _AttemptLost | BusBroken | None = None
        options = progress.info.options
        part_bytes = min((options and options.max_chunk_size) or nats.max_payload, MAX_PART_BYTES)
        self._question = msgspec.json.encode(
            {
                # One more than there are: a pull that is filled up ends without a word.
                "batch": progress.info.chunks + 1,
                "max_bytes": max(PULL_BYTES, part_bytes + OVERHEAD_BYTES),
                "expires": nanoseconds(EXPIRES_S),
                "idle_heartbeat": nanoseconds(HEARTBEAT_S),
            }
        )

    async def on_message(self, message: Msg) -> None:
        """Take what came for one of the pulls."""
        self._waiting.put_nowait(message)

    async def pull(self) -> None:
        """Ask for more."""
        self._pulls += 1
        inbox = f"{self._inbox}.{self._pulls}"
        self._asked_at[inbox] = self._consumer_seq
        await publish(self._nats, self._pull_subject, self._question, reply=inbox)

    async def take(self) -> list[bytes]:
        """Return the parts that are there, at least one.

        Raises:
            _AttemptLost: nothing comes, or not what should.
        """
        parts: list[bytes] = []
        while not parts:
            if self._lost is not None:
                raise self._lost
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await self._waiting.get()
            except TimeoutError:
                raise _AttemptLost(f"nothing was heard for {SILENCE_S:g} s") from None
            try:
                await self._add(message, parts)
                while not self._waiting.empty():
                    await self._add(self._waiting.get_nowait(), parts)
            except (_AttemptLost, BusBroken) as error:
                self._lost = error  # what came before it counts
        return parts

    async def _add(self, message: Msg, parts: list[bytes]) -> None:
        """Add a part to `parts`; when a pull has ended, ask for more."""
        headers = message.headers or {}
        status, description = headers.get("Status"), headers.get("Description", "")
        if status is None:
            seq, consumer_seq = _sequences(message.reply)
            if consumer_seq != self._consumer_seq + 1:
                raise _AttemptLost(f"message {self._consumer_seq + 1} was lost")
            self._consumer_seq, self._idle_heartbeats = consumer_seq, 0
            self._progress.add(message.data, seq)
            parts.append(message.data)
        elif status == "100":
            self._idle_heartbeats += 1
            if self._idle_heartbeats > MAX_IDLE_HEARTBEATS:
                raise _AttemptLost("the server has no more parts")
        elif (
            status == "409"
            and "MaxBytes" in description
            and self._consumer_seq > self._asked_at.pop(message.subject, 0)
        ):
            await self.pull()
        else:
            raise _AttemptLost(f"the pull ended: {status} {description}")


def _sequences(reply: str) -> tuple[int, int]:
    """Return a message's number in its stream, and among its consumer's."""
    # $JS.ACK.<stream>.<consumer>.<num_delivered>.<stream seq>.<consumer seq>.<time>.<num_pending>; newer servers put a
    # domain and an account before the stream, and may add to the end.
    fields = reply.split(".")
    at = 5 if len(fields) == 9 else 7
    return int(fields[at]), int(fields[at + 1])
