"""Publishes a worker's outgoing messages: frames to clients, acks to the queue and command acks to controllers.

It publishes only while the worker holds its lease.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from ...bus.nats.connection import Connection, publish
from ...schemas.errors import BusBroken, LocalProtocolError
from ..lifecycle import WorkerLifecycle
from .links import WorkerLinks
from .outbound import Outbound

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 1024**2
"""Maximum bytes in the socket buffer. Above it, no frame is sealed, so that later chunks can join the next frame."""
DRAIN_S = 1.0
"""Seconds to wait for the socket buffer to drain before the next check."""


class OutboundPublisher:
    """Publishes acks, and one frame of each outbound in turn.

    While the connection is down or the worker may not publish, all messages wait. A fence removes them.

    Args:
        on_broken: called with an outbound if the server will never accept one of its frames.
    """

    def __init__(
        self, nats: Connection, lifecycle: WorkerLifecycle, links: WorkerLinks, *, on_broken: Callable[[Outbound], None]
    ) -> None:
        self._nats = nats
        self._lifecycle = lifecycle
        self._links = links
        self._on_broken = on_broken
        self._has_frames = asyncio.Event()
        links.outbound.on_due = self._has_frames.set
        # Bounded by the number of worker requests and open commands.
        self._acks: deque[Callable[[], Awaitable[None]]] = deque()
        self._has_acks = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_hurried = False
        self.frames = 0
        """Number of published frames."""
        self.frames_lost = 0
        """Number of frames that could not be published. A link sends them again."""

    def wake(self) -> None:
        """Wake the publisher if it has something to publish."""
        self._changed.set()
        if self._links.outbound.sendable():
            self._has_frames.set()
        if self._acks:
            self._has_acks.set()

    def enqueue_acks(self, acks: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Append acks of queue messages or commands. They are published in this order as soon as possible."""
        self._acks.extend(acks)
        self.wake()

    async def wait_acknowledged(self) -> None:
        """Wait until all acks are published and each live client has acknowledged its frames, or until `hurry`."""
        await self.wait_until(lambda: self.is_acknowledged)

    async def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait until `is_met`, which is asked after each change of the outbounds or the state, or until `hurry`."""
        while not self._is_hurried and not is_met():
            self._changed.clear()
            await self._changed.wait()

    @property
    def is_acknowledged(self) -> bool:
        """True if all acks are published, and each live client has acknowledged its frames."""
        return not self._acks and self._links.outbound.is_acknowledged

    def hurry(self) -> None:
        """End `wait_acknowledged` and `wait_until` now and for good."""
        self._is_hurried = True
        self.wake()

    async def wait_connected(self) -> None:
        """Wait until the worker is connected or its lease has expired."""
        while not self._nats.is_connected and self._lifecycle.may_publish():
            self._changed.clear()
            await self._changed.wait()

    async def wait_sent(self) -> None:
        """Wait until no frame can be published: the remaining frames wait for credit, the connection or the lease."""
        while self._can_send() and self._links.outbound.sendable():
            self._changed.clear()
            self._has_frames.set()
            await self._changed.wait()

    def clear(self) -> None:
        """Remove the waiting acks because the worker was fenced."""
        self._acks.clear()

    def _can_send(self) -> bool:
        return self._nats.is_connected and self._lifecycle.may_publish()

    async def publish_frames(self) -> None:
        """Publish frames until cancelled."""
        while True:
            await self._has_frames.wait()
            self._has_frames.clear()
            while self._can_send() and (sendable := self._links.outbound.sendable()):
                for outbound in sendable:
                    await self._publish_frame(outbound)
                await self._yield_to_others()
            self._changed.set()

    async def _publish_frame(self, outbound: Outbound) -> None:
        """Seal and publish the next frame of `outbound`."""
        if not self._can_send():
            return
        incarnation = self._lifecycle.incarnation
        outgoing = self._links.next_frame(outbound)
        if outgoing is None:
            return
        try:
            await publish(self._nats, outgoing.subject, outgoing.data)
        except BusBroken as exc:
            self.frames_lost += 1
            logger.warning("frame.publish_failed subject=%s error=%s", outgoing.subject, exc)
            return
        except LocalProtocolError as exc:
            self.frames_lost += 1
            logger.error("frame.rejected subject=%s error=%s", outgoing.subject, exc)
            self._on_broken(outbound)
            return
        self.frames += 1
        if outgoing.message is not None and self._lifecycle.incarnation == incarnation:
            # The ack follows the frame on the same connection, and is not published if the frame was lost: the queue
            # then delivers the request again.
            await self._publish_ack(outgoing.message.ack)

    async def _yield_to_others(self) -> None:
        """Let the event loop add engine steps before the next frame of a large backlog."""
        await asyncio.sleep(0)
        while self._nats.is_connected and self._nats.pending_data_size > MAX_UNSENT_BYTES:
            await self._nats.confirm(timeout_s=DRAIN_S)

    async def publish_acks(self) -> None:
        """Publish acks until cancelled."""
        while True:
            await self._has_acks.wait()
            self._has_acks.clear()
            while self._acks and self._can_send():
                await self._publish_ack(self._acks.popleft())
            self._changed.set()

    async def publish_all(self, acks: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Publish acks, naks or in-progress acks to the queue now, before the waiting acks."""
        incarnation = self._lifecycle.incarnation
        for ack in acks:
            # If the worker is fenced during this loop, the remaining acks belong to requests that it no longer has.
            if not self._can_send() or self._lifecycle.incarnation != incarnation:
                return
            await self._publish_ack(ack)

    async def _publish_ack(self, ack: Callable[[], Awaitable[None]]) -> None:
        try:
            await ack()
        except BusBroken as exc:
            # The loss has no lasting effect: the queue delivers the message again, and controllers repeat commands.
            logger.warning("ack.publish_failed error=%s", exc)
