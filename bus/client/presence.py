"""The presence of workers as one client sees it: live, paused or silent. Runs on the bus thread."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import replace
from nats.aio.msg import Msg

from ...schemas.acks import Ack
from ...schemas.control import DesiredState, Resume, Wake
from ...schemas.errors import BusBroken, ErrorCode, NoWorkers, RemoteProtocolError, RollbusError
from ...schemas.messages import decode_presence
from ...schemas.presence import WorkerPresence, WorkerState
from ..control.store import DesiredStore
from ..logs import RejectionCount
from ..nats.connection import Connection, publish
from ..nats.failures import describe_reachable
from ..nats.jetstream import Unanswered
from ..protocol.attempt import events as on
from ..protocol.attempt.suspects import BUSY_FACTOR, SILENT_S, SilenceWatch
from ..protocol.fleet.desired import effective, shows_ack
from ..protocol.fleet.presence import LostWorker, PresenceTable, Survivor, accepts_whole_requests
from ..queue.publisher import QueueProbes
from ..queue.streams import QueueDepth, queue_depths
from ..subjects import Subjects
from .coordinator import AttemptCoordinator, ChildRequest

logger = logging.getLogger(__name__)

PING_WAIT_S = 0.5
"""Seconds in which a live worker answers a ping: a thousand round trips on a loopback."""
FIRST_WAIT_S = PING_WAIT_S
"""Seconds from the start of a watch until the answers to its first ping are complete."""
WARN_AFTER_S: Final = 10.0
"""Seconds. A weight update pauses a fleet for a few seconds. A longer pause may have been forgotten."""
ROUND_S: Final = 0.5
"""Seconds between two checks for requests that wait because of a pause."""
SILENCE_ROUND_S: Final = 1.0
"""Seconds between two checks for silent workers."""
READ_S: Final = 5.0
"""Seconds between two reads of a model's desired state while a worker with requests of this client does not serve."""
MAX_BEHIND_S: Final = 600.0
"""Seconds for which a worker may apply a recorded command, or receive weights before the next one. After that, its
silence counts, also if it says meanwhile that it serves."""


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


class PauseWarnings:
    """Tracks which models are paused. It logs once for each pause that requests of this client wait for its end."""

    def __init__(self, watcher: PresenceWatcher, coordinator: AttemptCoordinator, store: DesiredStore) -> None:
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = store
        # Models with a paused worker and without a serving worker, as of the last change of the fleet.
        self._paused: set[str] = set()
        # Time since which each of them is paused, and the seconds of the pauses that have ended, by model.
        self._paused_since: dict[str, float] = {}
        self._paused_s: dict[str, float] = {}
        # Time since which requests wait for the end of the pause, by model.
        self._waiting: dict[str, float] = {}
        # Models whose present pause was logged.
        self._told: set[str] = set()

    def update_paused(self) -> None:
        """Find the paused models, and remove pauses that have ended.

        Call this when a worker joins, leaves or changes its state.
        """
        able = [worker for worker in self._watcher.snapshot.workers if accepts_whole_requests(worker)]
        serving = {worker.model for worker in able if worker.state is WorkerState.SERVING}
        self._paused = {worker.model for worker in able if worker.state is WorkerState.PAUSED} - serving
        now, since = time.monotonic(), self._paused_since
        for model in since.keys() - self._paused:
            self._paused_s[model] = self._paused_s.get(model, 0.0) + now - since[model]
        self._paused_since = {model: since.get(model, now) for model in self._paused}
        self._told &= self._paused
        self._waiting = {model: since for model, since in self._waiting.items() if model in self._paused}

    def paused_s(self) -> dict[str, float]:
        """Return for how many seconds each model has been paused so far."""
        now, since = time.monotonic(), self._paused_since
        models = self._paused_s.keys() | since.keys()
        return {model: self._paused_s.get(model, 0.0) + now - since.get(model, now) for model in models}

    def mute_present(self) -> None:
        """Log nothing for the present pauses."""
        self._told |= self._paused

    async def run(self) -> None:
        """Check for waiting requests until cancelled."""
        while True:
            await asyncio.sleep(ROUND_S)
            now, paused = time.monotonic(), self._paused - self._told
            if not paused:
                continue
            open_models = {child.open_call.model for child in self._coordinator.open_children(lambda _: True)}
            self._waiting = {model: self._waiting.get(model, now) for model in paused & open_models}
            for model in [model for model, since in self._waiting.items() if now - since >= WARN_AFTER_S]:
                self._told.add(model)
                since = await self.paused_since(model)
                when = "" if since is None else f" since {since.astimezone():%Y-%m-%d %H:%M:%S}"
                reason = f"the fleet is paused{when}; to resume it: rollbus resume"
                logger.warning("client.pause_detected model=%s reason=%s", model, reason)

    async def paused_since(self, model: str) -> datetime | None:
        """Return the time of the last command that pauses a worker of `model`. None if unknown or if none is paused."""
        try:
            state = await self._store.read(model)
            if state is None:
                return None
            registers = [effective(state, worker.worker) for worker in self._watcher.table.workers(model)]
            epochs = {found["pause"].epoch for found in registers if "pause" in found}
            times = [await self._store.recorded_at(model, epoch) for epoch in epochs]
        except RollbusError:
            # The log line is useful without the time. A user may also lack the permission to read the history.
            return None
        return max((time for time in times if time is not None), default=None)


class SilenceChecks:
    """Moves requests away from workers that offered to run them and send no tokens."""

    def __init__(self, nats: Connection, watcher: PresenceWatcher, coordinator: AttemptCoordinator) -> None:
        self._nats = nats
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = DesiredStore(nats, watcher.subjects)
        # The models of the workers that do not serve now, with the time of the last read.
        self._states: dict[str, tuple[float, DesiredState | None]] = {}
        # By worker with open requests: the recorded epoch, and since when the worker says that it is busy with weights.
        self._behind_since: dict[str, tuple[int, float]] = {}
        self.watch = SilenceWatch()
        coordinator.silent = self.watch.avoided

    def named(self, workers: Sequence[WorkerPresence]) -> tuple[WorkerPresence, ...]:
        """Return the presence of these workers, where the last error of silent workers is their silence."""
        error = "it offered to run requests of this client and sent no tokens of them"
        avoided = self.watch.avoided
        return tuple(replace(one, last_error=error) if one.worker in avoided else one for one in workers)

    async def run(self) -> None:
        """Check until cancelled."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(SILENCE_ROUND_S)
            offered = self._coordinator.open_children(lambda child: child.worker is not None)
            suspended = await self._suspended({child.worker or "" for child in offered})
            now = time.monotonic()
            elapsed_s, checked_at = now - checked_at, now
            if not self._nats.is_connected or elapsed_s > 2 * SILENCE_ROUND_S + READ_S:
                # This process did not read, so it cannot judge.
                suspended = {child.worker or "" for child in offered}
            waiting_since = now - BUSY_FACTOR * SILENT_S
            live = [
                child
                for child in offered
                # A worker without a free slot may let followers of a group wait, behind those of other clients.
                if child.is_open and child.worker is not None and (child.has_begun or child.heard_at < waiting_since)
            ]
            for worker in list(self.watch.avoided):
                if (presence := self._watcher.table.get(worker)) is not None:
                    self.watch.forget(worker, presence.incarnation)
            self._move(self.watch.check(live, suspended, elapsed_s, now), now)

    def _move(self, children: Sequence[ChildRequest], now: float) -> None:
        for worker, count in Counter(child.worker or "" for child in children).items():
            logger.warning("worker.silence_detected worker=%s requests=%s", worker, count)
        for child in children:
            silent_s = now - child.heard_at
            message = f"worker {child.worker} offered to run the request and sent no token of it for {silent_s:.0f} s"
            child.avoids_queue = True
            self._coordinator.send(child, on.Lost(child.open_call.failure(ErrorCode.WORKER_LOST, message)))

    async def _suspended(self, workers: set[str]) -> set[str]:
        """Return the workers that the recorded state keeps from generating, not those that only say so."""
        found, models = set(), set()
        self._behind_since = {worker: since for worker, since in self._behind_since.items() if worker in workers}
        for worker in workers:
            presence = self._watcher.table.get(worker)
            if presence is None or presence.state is WorkerState.SERVING:
                continue
            models.add(presence.model)
            try:
                state = await self._state(presence.model)
            except RollbusError as exc:
                logger.debug("silence.check_failed worker=%s error=%s", worker, exc)
                found.add(worker)
                continue
            if state is not None and is_stopped(state, presence):
                found.add(worker)
            elif presence.transfer is not None or (state is not None and presence.epoch < state.epoch):
                now, recorded = time.monotonic(), 0 if state is None else state.epoch
                epoch, since = self._behind_since.get(worker, (recorded, now))
                if epoch != recorded:
                    since = now
                self._behind_since[worker] = recorded, since
                if now - since < MAX_BEHIND_S:
                    found.add(worker)
        # Workers choose the names of their models, and may change them.
        self._states = {model: read for model, read in self._states.items() if model in models}
        return found

    async def _state(self, model: str) -> DesiredState | None:
        read_at, state = self._states.get(model, (-READ_S, None))
        if time.monotonic() - read_at >= READ_S:
            state = await self._store.read(model)
            self._states[model] = time.monotonic(), state
        return state


def is_stopped(state: DesiredState, presence: WorkerPresence) -> bool:
    """Return True if a recorded command pauses or drains this worker, or puts it to sleep."""
    registers = effective(state, presence.worker)
    return any(
        register in registers and not isinstance(registers[register].command, Resume | Wake)
        for register in ("pause", "sleep")
    )
