"""A worker's own life: its state, its incarnation, and the lease without which it must not speak.

Every second the worker announces itself. An announcement counts once the server has confirmed it; one that sits in a
broken connection renews nothing. A worker that was not confirmed for its lease, less a margin, fences itself before
others take it for dead: it gives up all that it had, and comes back as a new incarnation.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from bus.connection import Connection, publish
from bus.protocol.lease import OwnLease
from bus.protocol.states import SPEAKING, WORKER, WorkerEvent
from bus.subjects import Subjects
from schemas.errors import BusBroken
from schemas.messages import encode_json
from schemas.presence import WorkerPresence, WorkerState
from workers.config import LEASE_MARGIN_S, WorkerConfig

__all__ = ["HEARTBEAT_S", "Life"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Between two heartbeats of a link, and between two announcements, which a short lease makes more frequent."""
CONFIRM_S = 1.0
"""How long a fenced worker waits for the answer to one announcement before it makes another."""


class Life:
    """Who this worker is now, and whether it may speak.

    Args:
        nats: connected.
        describe: what to announce.
        on_fenced: called when the lease has run out, with the new incarnation in place; gives up what the old one had.
        on_changed: called when the state has changed.
    """

    def __init__(
        self,
        config: WorkerConfig,
        nats: Connection,
        *,
        describe: Callable[[], WorkerPresence],
        on_fenced: Callable[[], None],
        on_changed: Callable[[], None],
    ) -> None:
        self._worker_id = config.worker_id
        self._nats = nats
        self._subject = Subjects(config.fleet).presence(config.worker_id)
        self._describe = describe
        self._on_fenced = on_fenced
        self._on_changed = on_changed
        self._confirmed_at = time.monotonic()
        self._lease = OwnLease(config.lease_s, LEASE_MARGIN_S, self._confirmed_at)
        # Of several announcements that the lease has time for, one alone must be confirmed.
        self._heartbeat_s = min(HEARTBEAT_S, (config.lease_s - LEASE_MARGIN_S) / 4)
        self._wanted = asyncio.Event()
        self.state = WORKER.initial
        self.incarnation = new_incarnation()
        self.times_fenced = 0

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Life {self._worker_id} {self.incarnation} {self.state} times_fenced={self.times_fenced}>"

    def advance(self, event: WorkerEvent) -> None:
        """Change the state and announce it."""
        self.state = WORKER.next(self.state, event)
        logger.info("worker.%s worker=%s incarnation=%s", self.state, self._worker_id, self.incarnation)
        self.announce()
        self._on_changed()

    def announce(self) -> None:
        """Announce this worker now rather than with the next heartbeat."""
        self._wanted.set()

    def may_speak(self) -> bool:
        """Asked before everything that others act on: the worker is ready, and its lease holds; else it is fenced here.

        This process may have stood still since it last asked, with a clock that went on.
        """
        if self.state not in SPEAKING:
            return False
        if self._lease.is_held(time.monotonic()):
            return True
        self.fence("its lease ran out unconfirmed")
        return False

    def may_take(self) -> bool:
        """Requests may be taken: the worker may speak, and serves."""
        return self.state is WorkerState.SERVING and self.may_speak()

    def fence(self, reason: str) -> None:
        """End this incarnation; the next one may speak once an announcement of it is confirmed."""
        self.times_fenced += 1
        logger.warning("worker.gives_up worker=%s incarnation=%s reason=%s", self._worker_id, self.incarnation, reason)
        self.incarnation = new_incarnation()
        if self.state in SPEAKING:
            self.advance(WorkerEvent.FENCED)
        self._on_fenced()

    async def run(self) -> None:
        """Announce this worker again and again, and fence it when its lease runs out, until cancelled."""
        while True:
            await self.publish()
            self.may_speak()
            try:
                async with asyncio.timeout(min(self._heartbeat_s, self._lease_left_s())):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            self._wanted.clear()

    async def publish(self) -> None:
        """Announce this worker, and wait for the answer at most until the lease runs out."""
        # Buffered while the connection is down, an announcement would reach others long after it was true.
        if not self._nats.is_connected:
            return
        published_at = time.monotonic()
        presence = self._describe()
        try:
            await publish(self._nats, self._subject, encode_json(presence))
        except BusBroken as exc:
            logger.warning("presence.lost error=%s", exc)
            return
        if not await self._nats.confirm(timeout_s=self._lease_left_s()):
            return
        self._lease.confirm(published_at)
        self._confirmed_at = max(self._confirmed_at, published_at)
        is_ours = presence.incarnation == self.incarnation and presence.state is WorkerState.FENCED
        if is_ours and self.state is WorkerState.FENCED and self._lease.is_held(time.monotonic()):
            self.advance(WorkerEvent.CONFIRMED)

    @property
    def lease_age_s(self) -> float:
        """Seconds since an announcement was last confirmed."""
        return max(time.monotonic() - self._confirmed_at, 0.0)

    def _lease_left_s(self) -> float:
        """Seconds until the lease runs out; where it has, those between two attempts to get another."""
        left_s = self._lease.expires_at - time.monotonic()
        return left_s if left_s > 0 else CONFIRM_S


def new_incarnation() -> str:
    """A name for one life of a worker, unlike all others."""
    return uuid.uuid4().hex[:8]
