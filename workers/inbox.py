"""A worker's subscriptions to what other programs publish: rejected messages are counted, and floods are not read.

Most of the cost of a message is its callback, so a limit on answers does not help. If a subscription is flooded, the
worker unsubscribes for `DROP_S`. Meanwhile it lives by its own presence and by the queue.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..bus.logs import RejectionCount
from ..bus.nats.connection import Connection, subscribe
from ..bus.nats.library import Msg, Subscription
from ..bus.protocol.fleet.leases import DROP_S, FloodMeter
from ..bus.thread_calls import is_set_within
from ..schemas.errors import RemoteProtocolError

logger = logging.getLogger(__name__)

CHECK_S: Final = 0.25
"""Seconds between two presence messages while pings are not read: half of the time that a client waits for an answer.
"""
SHOWN_S: Final = 60.0
"""Seconds for which the presence of the worker names the sender of the last flood."""


@dataclass(slots=True)
class _GuardedSubject:
    subject: str
    handler: Callable[[Msg], None]
    meter: FloodMeter
    subscription: Subscription | None = None
    back_at: float = 0.0


class WorkerInbox:
    """The subscriptions of one worker.

    Args:
        on_unread: called four times a second while a subscription is dropped.

    Attributes:
        rejected: messages that a handler rejected with `RemoteProtocolError`.
    """

    def __init__(self, nats: Connection, on_unread: Callable[[], None]) -> None:
        self._nats = nats
        self._on_unread = on_unread
        self._guarded: list[_GuardedSubject] = []
        self._flooded = asyncio.Event()
        self._problem = ""
        self._problem_at = 0.0
        self.rejected = RejectionCount()

    @property
    def problem(self) -> str | None:
        """The last flood and its sender, for a minute."""
        return self._problem if self._problem and time.monotonic() - self._problem_at < SHOWN_S else None

    async def subscribe(self, subject: str, handler: Callable[[Msg], None], meter: FloodMeter | None = None) -> None:
        """Call `handler` for each message, as `bus.nats.connection.subscribe` does.

        Args:
            meter: detects a flood; None: the worker cannot do without the messages.
        """

        def handle(message: Msg) -> None:
            try:
                handler(message)
            except RemoteProtocolError as exc:
                self.rejected.warn(logger, "message.rejected subject=%s so_far=%s error=%s", message.subject, exc)

        if meter is None:
            await subscribe(self._nats, subject, handle)
            return
        self._guarded.append(_GuardedSubject(subject, handle, meter))
        await self._open(self._guarded[-1])

    async def _open(self, guarded: _GuardedSubject) -> None:
        meter = guarded.meter

        def handle(message: Msg) -> None:
            # After the flood was detected, the messages that have already arrived are skipped.
            if not meter.is_flooded and meter.add(message.subject, time.monotonic()):
                self._flooded.set()
            if not meter.is_flooded:
                guarded.handler(message)

        meter.reset(time.monotonic())
        guarded.subscription = await subscribe(self._nats, guarded.subject, handle)

    async def run(self) -> None:
        """Drop flooded subscriptions, and open them again later, until cancelled.

        Raises:
            BusClosed: the connection is closed.
        """
        while True:
            are_open = all(guarded.subscription is not None for guarded in self._guarded)
            await is_set_within(self._flooded, None if are_open else CHECK_S)
            self._flooded.clear()
            for guarded in self._guarded:
                await self._check(guarded)
            if not are_open:
                self._on_unread()

    async def _check(self, guarded: _GuardedSubject) -> None:
        subscription, now = guarded.subscription, time.monotonic()
        if subscription is None:
            if now >= guarded.back_at:
                await self._open(guarded)
        elif guarded.meter.is_flooded and not self._nats.is_closed:
            guarded.subscription, guarded.back_at = None, now + DROP_S
            await subscription.unsubscribe()
            self._problem, self._problem_at = guarded.meter.describe(guarded.subject), now
            logger.warning("subscription.flooded subject=%s problem=%s", guarded.subject, self._problem)
