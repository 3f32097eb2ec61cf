"""Tracks the presence of workers. Runs on the bus thread."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from nats.aio.msg import Msg

from ...schemas.acks import Ack
from ...schemas.errors import BusBroken, NoWorkers, RemoteProtocolError
from ...schemas.messages import decode_presence
from ...schemas.presence import WorkerPresence
from ..logs import RejectionCount
from ..nats.connection import Connection, publish
from ..nats.jetstream import Unanswered
from ..nats.reachable import describe_reachable
from ..protocol.fleet.behind import shows_ack
from ..protocol.fleet.fleet_snapshot import accepts_whole_requests
from ..protocol.fleet.presence_table import LostWorker, PresenceTable, Survivor
from ..queue.storing import QueueProbes
from ..queue.streams import QueueDepth, queue_depths
from ..subjects import Subjects

__all__ = ["PresenceWatcher"]

logger = logging.getLogger(__name__)

PING_WAIT_S = 0.5
"""Seconds in which a live worker answers a ping: a thousand round trips on a loopback."""
FIRST_WAIT_S = PING_WAIT_S
"""Seconds from the start of a watch until the answers to its first ping are complete."""


class PresenceWatcher:
    """The live workers, and methods that wait for them.

    Args:
        on_lost: called with each lost worker or incarnation.
        on_change: called when a worker joins, leaves or applies a change.
        on_survivor: called with each worker that was marked lost and publishes presence again.
        on_heard: called with each presence, before the other callbacks.

    Attributes:
        snapshot: the live workers. It is replaced as a whole, so any thread may read it.
        client: name of this client, for its pings; None: it does not name itself.
        rejected: presence messages that could not be decoded.
    """

    def __init__(
        self,
        nats: Connection,
        subjects: Subjects,
        on_lost: Callable[[LostWorker], None],
        on_change: Callable[[], None],
        on_survivor: Callable[[Survivor], None] = lambda _: None,
        on_heard: Callable[[WorkerPresence], None] = lambda _: None,
    ) -> None:
        self._nats = nats
        self.subjects = subjects
        self._on_lost = on_lost
        self._on_survivor = on_survivor
        self._on_change = on_change
        self._on_heard = on_heard
        self.table = PresenceTable()
        self._changed = asyncio.Event()
        self._pinged_at = -PING_WAIT_S
        self._listening_since = -FIRST_WAIT_S
        self.snapshot = self.table.snapshot
        self.client: str | None = None
        self.rejected = RejectionCount()
        self._probes = QueueProbes(nats, subjects)

    def __repr__(self) -> str:
        """Return one line with each worker and its state."""
        return f"<PresenceWatcher {self.subjects.fleet} {self.table!r}>"

    async def receive(self, message: Msg) -> None:
        """Process a presence message."""
        try:
            presence = decode_presence(message.data)
            if message.subject != self.subjects.presence(presence.worker):
                raise RemoteProtocolError(f"worker {presence.worker} published presence on {message.subject}")
        except RemoteProtocolError as exc:
            if so_far := self.rejected.add():
                logger.warning("presence.rejected subject=%s so_far=%s error=%s", message.subject, so_far, exc)
            return
        num_before = len(self.table.incarnations_of(presence.worker))
        change = self.table.update(presence, time.monotonic())
        self._on_heard(presence)
        if len(self.table.incarnations_of(presence.worker)) > max(num_before, 1):
            logger.warning(
                "worker.duplicate_detected worker=%s incarnation=%s host=%s pid=%s",
                presence.worker,
                presence.incarnation,
                presence.host,
                presence.pid,
            )
        if isinstance(change, Survivor):
            self._on_survivor(change)
        elif change is not None:
            self._on_lost(change)
        self._notify()

    def expire(self) -> None:
        """Remove workers whose lease has expired."""
        for lost in self.table.expire(time.monotonic()):
            logger.warning("worker.lost worker=%s reason=%s", lost.worker, lost.reason)
            self._on_lost(lost)
        self._notify()

    def remove_all(self, reason: str) -> None:
        """Remove all workers after a long outage without presence."""
        for lost in self.table.remove_all(reason):
            self._on_lost(lost)
        self._notify()

    def _notify(self) -> None:
        if self.table.snapshot is not self.snapshot:
            self.snapshot = self.table.snapshot
            self._changed.set()
            self._on_change()

    async def restart_watch(self) -> None:
        """Restart all leases after an outage, and ask all workers for their presence."""
        self.table.restart_leases(time.monotonic())
        self._pinged_at = -PING_WAIT_S
        self._listening_since = time.monotonic()
        await self._ping()

    async def known_workers(self) -> tuple[WorkerPresence, ...]:
        """Return the latest presence of live workers, after all had time to answer since the watch began."""
        left_s = self._listening_since + FIRST_WAIT_S - time.monotonic()
        if left_s > 0:
            await self.wait_until(lambda: False, left_s)
        return self.table.workers()

    async def wait_for_acked(self, acks: Collection[Ack], timeout_s: float) -> None:
        """Wait until presence shows what these acks of recorded commands say, for at most `timeout_s` seconds."""
        await self.wait_until(lambda: all(shows_ack(self.table.get(ack.worker), ack) for ack in acks), timeout_s)

    async def ping_workers(self) -> tuple[WorkerPresence, ...]:
        """Ask all workers for their state, and return the answers of the next half second.

        Raises:
            BusBroken: the connection to NATS is gone.
        """
        await self._ping()
        await self.wait_until(lambda: False, PING_WAIT_S)
        return self.table.workers()

    async def workers_and_queues(
        self,
    ) -> tuple[tuple[WorkerPresence, ...], tuple[QueueDepth, ...], dict[str, str]]:
        """Return the workers as `ping_workers` does, the waiting requests, and the reasons why queues do not answer.

        Raises:
            BusBroken: the connection to NATS is gone.
        """
        workers = await self.ping_workers()
        return workers, *await self.queues()

    async def queues(self) -> tuple[tuple[QueueDepth, ...], dict[str, str]]:
        """Return the waiting requests for the live workers, and by model the reason why a queue does not answer."""
        models = sorted({worker.model for worker in self.table.workers() if accepts_whole_requests(worker)})
        async with asyncio.TaskGroup() as tasks:
            looks = [tasks.create_task(self._depths(model)) for model in models]
        found = [look.result() for look in looks]
        depths = tuple(depth for depths in found if not isinstance(depths, str) for depth in depths)
        problems = {model: one for model, one in zip(models, found, strict=True) if isinstance(one, str)}
        return depths, problems

    async def check_queues(self, client: str) -> dict[str, str]:
        """Publish a probe to the queue of each live worker's model. Return by model why it was not stored.

        Args:
            client: name of this client, which the probes carry.
        """
        models = sorted({worker.model for worker in self.table.workers() if accepts_whole_requests(worker)})
        return await self._probes.problems(client, models)

    async def _depths(self, model: str) -> tuple[QueueDepth, ...] | str:
        """Return the depths of the queue of `model`, or the reason why it does not answer."""
        try:
            return await queue_depths(self._nats, self.subjects, (model,))
        except Unanswered as exc:
            if not self._nats.is_in_cluster:
                return str(exc)
            return f"has no leader: {await describe_reachable(self._nats)}"
        except BusBroken as exc:
            # A server without JetStream has no queue. The presence of its workers is still valid.
            logger.warning("fleet.queue_depths_read_failed error=%s", exc)
            return ()

    async def wait_for_workers(self, count: int, model: str | None, timeout_s: float) -> None:
        """Wait until at least `count` workers serve `model`, or any model if it is None.

        Raises:
            NoWorkers: fewer workers served it within `timeout_s` seconds. The message gives their states.
        """
        await self._ping()
        if not await self.wait_until(lambda: len(self.table.serving(model)) >= count, timeout_s):
            raise NoWorkers(
                message=f"{len(self.table.serving(model))} of {count} workers served within {timeout_s:g} s"
                + self.snapshot.describe_others(model)
            )

    async def wait_awaited(self, model: str) -> None:
        """Ask the workers if none seems to serve `model`. Wait until one does or starts, or all had time to answer.

        Raises:
            BusBroken: the connection to NATS is permanently lost.
        """
        if model not in self.snapshot.awaited:
            await self._ping()
            left_s = self._pinged_at + PING_WAIT_S - time.monotonic()
            await self.wait_until(lambda: model in self.snapshot.awaited, left_s)

    async def _ping(self) -> None:
        # All callers that wait at the same time share one ping.
        if time.monotonic() - self._pinged_at >= PING_WAIT_S:
            self._pinged_at = time.monotonic()
            if self.client is not None:
                await publish(self._nats, self.subjects.ping_by(self.client), b"")
            # Workers of earlier releases read no other ping.
            await publish(self._nats, self.subjects.ping, b"")

    async def wait_until(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a condition on the snapshot is met. Return False if it is not met within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                while not is_met():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return is_met()
        return True
