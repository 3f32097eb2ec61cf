"""Follows the announcements of workers, on the bus thread."""

import asyncio
import logging
import time
from collections.abc import Callable

from nats.aio.msg import Msg

from bus.connection import Connection, publish
from bus.protocol.fleet_view import FleetView, Gone, takes_whole
from bus.queue.streams import QueueDepth, queue_depths
from bus.subjects import Subjects
from schemas.errors import BusBroken, NoWorkers, RemoteProtocolError
from schemas.messages import decode_presence
from schemas.presence import WorkerPresence, WorkerState

__all__ = ["FleetWatch"]

logger = logging.getLogger(__name__)

PING_WAIT_S = 0.5
"""How long after a ping a live worker may take to answer: a thousand times the round trip on a loopback."""


class FleetWatch:
    """Who lives, and how to wait for them.

    Args:
        nats: connected.
        on_gone: hears of each worker, or life of one, that ends.
        on_change: called when a worker comes, goes or changes its state.

    Attributes:
        snapshot: the live workers; replaced as a whole, so that any thread may read it.
        bad_messages: announcements that did not decode.
    """

    def __init__(
        self, nats: Connection, subjects: Subjects, on_gone: Callable[[Gone], None], on_change: Callable[[], None]
    ) -> None:
        self._nats = nats
        self._subjects = subjects
        self._on_gone = on_gone
        self._on_change = on_change
        self._view = FleetView()
        self._changed = asyncio.Event()
        self._pinged_at = -PING_WAIT_S
        self._listening_since = -PING_WAIT_S
        self.snapshot = self._view.snapshot
        self.bad_messages = 0

    def __repr__(self) -> str:
        """One line with each worker and its state."""
        return f"<FleetWatch {self._subjects.fleet} {self._view!r}>"

    async def receive(self, message: Msg) -> None:
        """Take a worker's announcement."""
        try:
            presence = decode_presence(message.data)
            if message.subject != self._subjects.presence(presence.worker):
                raise RemoteProtocolError(f"worker {presence.worker} announced on {message.subject}")
        except RemoteProtocolError as exc:
            self.bad_messages += 1
            logger.warning("presence.bad subject=%s error=%s", message.subject, exc)
            return
        gone = self._view.update(presence, time.monotonic())
        if gone is not None:
            self._on_gone(gone)
        self._notice()

    def expire(self) -> None:
        """Drop workers whose lease has run out."""
        for gone in self._view.expire(time.monotonic()):
            logger.warning("worker.gone worker=%s reason=%s", gone.worker, gone.reason)
            self._on_gone(gone)
        self._notice()

    def _notice(self) -> None:
        if self._view.snapshot is not self.snapshot:
            self.snapshot = self._view.snapshot
            self._changed.set()
            self._on_change()

    def get(self, worker: str) -> WorkerPresence | None:
        """What a live worker announced last."""
        return self._view.get(worker)

    def lives(self) -> frozenset[tuple[str, str]]:
        """Worker and incarnation of all that live and have not fenced themselves."""
        workers = self._view.workers()
        return frozenset((p.worker, p.incarnation) for p in workers if p.state is not WorkerState.FENCED)

    def serving(self, model: str) -> tuple[WorkerPresence, ...]:
        """What those announced last that take requests for `model`."""
        return self._view.serving(model)

    def target_version(self, model: str) -> int | None:
        """The newest weights that any live worker of `model` should have; None: none has said."""
        return self._view.target_version(model)

    async def listen_anew(self) -> None:
        """Start leases anew, where we could not hear for a while, and ask who is there."""
        self._view.renew_all(time.monotonic())
        self._pinged_at = -PING_WAIT_S
        self._listening_since = time.monotonic()
        await self._ping()

    async def known(self) -> tuple[WorkerPresence, ...]:
        """What live workers announced last, once all have had the time to answer since we began to listen."""
        left_s = self._listening_since + PING_WAIT_S - time.monotonic()
        if left_s > 0:
            await self._wait(lambda: False, left_s)
        return self._view.workers()

    async def asked(self) -> tuple[WorkerPresence, ...]:
        """Ask all workers for their state, and return what was heard within half a second.

        Raises:
            BusBroken: the connection to NATS is gone.
        """
        await self._ping()
        await self._wait(lambda: False, PING_WAIT_S)
        return self._view.workers()

    async def announced(self) -> tuple[tuple[WorkerPresence, ...], tuple[QueueDepth, ...]]:
        """What `asked` returns, and how much waits for these workers.

        Raises:
            BusBroken: the connection to NATS is gone.
        """
        workers = await self.asked()
        try:
            models = {worker.model for worker in workers if takes_whole(worker)}
            depths = await queue_depths(self._nats, self._subjects, tuple(sorted(models)))
        except BusBroken as exc:
            # Workers of a server without JetStream make no queue; what they say of themselves counts all the same.
            logger.warning("fleet.no_depths error=%s", exc)
            depths = ()
        return workers, depths

    async def wait_for_workers(self, count: int, model: str | None, timeout_s: float) -> None:
        """Wait until at least `count` workers serve `model`, or any.

        Raises:
            NoWorkers: fewer did within `timeout_s` seconds; the message says what they were doing.
        """
        await self._ping()
        if not await self._wait(lambda: len(self._view.serving(model)) >= count, timeout_s):
            raise NoWorkers(
                message=f"{len(self._view.serving(model))} of {count} workers came up within {timeout_s:g} s"
                + self.snapshot.others(model)
            )

    async def resolve_model(self, model: str | None) -> str:
        """The model that a request for `model` goes to, after asking who is there if nobody seems to serve it.

        Raises:
            NoWorkers: no worker serves it.
            InvalidRequest: no model was named and the fleet serves several, or only others.
        """
        if not self.snapshot.is_served(model):
            await self._ping()
            left_s = self._pinged_at + PING_WAIT_S - time.monotonic()
            await self._wait(lambda: self.snapshot.is_served(model), left_s)
        return self.snapshot.resolve_model(model)

    async def _ping(self) -> None:
        # One ping serves every caller that waits for its answers.
        if time.monotonic() - self._pinged_at >= PING_WAIT_S:
            self._pinged_at = time.monotonic()
            await publish(self._nats, self._subjects.ping, b"")

    async def _wait(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                while not is_met():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return is_met()
        return True
