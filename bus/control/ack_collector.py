"""Publishes commands and collects the command acks, on the bus thread.

A command or an ack may be lost. The collector therefore repeats a command to the workers that owe an ack if no new ack
arrives. Workers execute a repeated command only once and send the same ack.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs
from nats.aio.msg import Msg

from ...schemas.acks import Ack
from ...schemas.control import AnyCommand
from ...schemas.errors import BusBroken, InvalidRequest, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_ack, encode_json
from ..logs import RejectionCount
from ..nats.connection import Connection, subscribe
from ..nats.permitted import publish_permitted
from ..protocol.fleet.command_result import AckTracker
from ..protocol.fleet.presence_table import LostWorker
from ..subjects import Subjects

__all__ = ["MARGIN_S", "AckCollector", "CommandMessage", "OnAck"]

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""Seconds without a new ack before a command is repeated. The first ack of a busy worker takes less. A large fleet
sends new acks all the time, and a repeat would only delay it."""
MAX_REPEAT_S: Final = 10.0
"""Seconds before a command is repeated even if new acks arrive, as they do during a load of several minutes."""
MARGIN_S: Final = 5.0
"""Seconds beyond the command's timeout, for transport, for a worker's timeout ack, and for the steps before
execution."""
MAX_NEWS: Final = 4096
"""Maximum number of acks that wait for the caller's `OnAck`: two of each worker of a large fleet. Above it, `OnAck`
misses the oldest acks; the command result has all."""

OnAck = Callable[[Ack], None]
"""Called on the bus thread with each new ack to show progress. It must return immediately. An exception ends the wait
for acks."""


@dataclass(frozen=True, slots=True)
class CommandMessage:
    """A command as published, and the workers that must ack it."""

    command: AnyCommand
    workers: frozenset[str]
    is_own_read: bool = False
    """True: publish a read to each worker on the subject for reads of own requests."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A published command and the state of the wait for its acks."""

    tracker: AckTracker
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    news: deque[Ack] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    published_at: float = -math.inf
    """Time of the last publication, on `time.monotonic()`."""
    news_at: float = -math.inf
    """Time of the last new ack."""

    @property
    def repeat_at(self) -> float:
        """Time of the next repeat."""
        return min(max(self.published_at, self.news_at) + REPEAT_S, self.published_at + MAX_REPEAT_S)


class AckCollector:
    """The open commands of one controller. Lives on the bus thread; call `start` before use.

    Attributes:
        rejected: acks that did not decode or named another worker.
    """

    def __init__(self, nats: Connection, subjects: Subjects, controller: str) -> None:
        self._nats = nats
        self._subjects = subjects
        self._controller = controller
        self._under_way: dict[str, _UnderWay] = {}
        self.rejected = RejectionCount()

    def __repr__(self) -> str:
        """Return one line with the unfinished commands."""
        return f"<AckCollector {self._controller} {[each.tracker for each in self._under_way.values()]}>"

    async def start(self) -> None:
        """Subscribe to acks."""
        await subscribe(self._nats, self._subjects.acks_to(self._controller), self.receive)

    async def receive(self, message: Msg) -> None:
        """Handle an ack of a worker."""
        try:
            ack = decode_ack(message.data)
            if message.subject != self._subjects.ack(self._controller, ack.worker):
                raise RemoteProtocolError(f"worker {ack.worker} answered on {message.subject}")
        except RemoteProtocolError as exc:
            if so_far := self.rejected.add():
                logger.warning("ack.rejected subject=%s so_far=%s error=%s", message.subject, so_far, exc)
            return
        under_way = self._under_way.get(ack.id)
        if under_way is None:
            logger.debug("ack.received_late id=%s worker=%s status=%s", ack.id, ack.worker, ack.status)
            return
        if under_way.tracker.add_ack(ack, time.monotonic()):
            under_way.news.append(ack)
            under_way.news_at = time.monotonic()
        under_way.changed.set()

    def mark_lost(self, lost: LostWorker) -> None:
        """Stop the wait for acks of a lost worker or incarnation."""
        for under_way in self._under_way.values():
            if under_way.tracker.mark_lost(lost):
                under_way.changed.set()

    @contextmanager
    def expecting(self, tracker: AckTracker) -> Iterator[None]:
        """During the block, add incoming acks to `tracker` and mark lost workers in it.

        Raises:
            InvalidRequest: another open command has this id.
        """
        if tracker.id in self._under_way:
            raise InvalidRequest(field="id", problem=f"is {tracker.id}, the id of an open command", allowed="a new id")
        self._under_way[tracker.id] = _UnderWay(tracker)
        try:
            yield
        finally:
            del self._under_way[tracker.id]

    async def collect(
        self, tracker: AckTracker, messages: Sequence[CommandMessage], wait_s: float, on_ack: OnAck | None
    ) -> None:
        """Publish the commands and wait up to `wait_s` seconds for their acks. Call this inside `expecting`.

        Raises:
            PermissionDenied: this user may not publish commands.
            BusBroken: the connection was lost permanently.
            LocalProtocolError: the command is over the server's `max_payload`.
        """
        under_way = self._under_way[tracker.id]
        deadline = time.monotonic() + wait_s
        await self._publish(messages)
        under_way.published_at = time.monotonic()
        while not tracker.is_settled and time.monotonic() < deadline:
            await _wait(under_way.changed, min(under_way.repeat_at, deadline))
            _report_acks(under_way.news, on_ack)
            if time.monotonic() >= under_way.repeat_at:
                await self._repeat(tracker, messages)
                under_way.published_at = time.monotonic()
        _report_acks(under_way.news, on_ack)

    async def _repeat(self, tracker: AckTracker, messages: Sequence[CommandMessage]) -> None:
        if not self._nats.is_connected:
            # The client would buffer the repeat and each later one until the reconnect.
            return
        owing = set(tracker.owing)
        owed = ((message, message.workers & owing) for message in messages if message.workers & owing)
        await self._publish(
            replace(message, command=structs.replace(message.command, workers=tuple(sorted(rest))), workers=rest)
            for message, rest in owed
        )

    def _published(self, messages: Iterable[CommandMessage]) -> Iterator[tuple[str, AnyCommand]]:
        """Yield the subject and the command of each publication."""
        for message in messages:
            if not message.is_own_read:
                yield self._subjects.control(self._controller), message.command
                continue
            for worker in sorted(message.workers):
                yield self._subjects.read(self._controller, worker), structs.replace(message.command, workers=(worker,))

    async def _publish(self, messages: Iterable[CommandMessage]) -> None:
        for subject, command in self._published(messages):
            try:
                data = encode_json(command)
                await publish_permitted(self._nats, subject, data, self._nats.signatures.headers(subject, data) or None)
            except PermissionDenied:
                raise
            except BusBroken as exc:
                if self._nats.lost is not None:
                    raise
                # `collect` repeats the command after the reconnect.
                logger.warning("command.publish_failed id=%s error=%s", command.id, exc)


async def _wait(changed: asyncio.Event, until: float) -> None:
    try:
        async with asyncio.timeout_at(until - time.monotonic() + asyncio.get_running_loop().time()):
            await changed.wait()
    except TimeoutError:
        return
    changed.clear()


def _report_acks(news: deque[Ack], on_ack: OnAck | None) -> None:
    while news:
        ack = news.popleft()
        if on_ack is not None:
            on_ack(ack)
