"""The presence of workers as one client sees it, and the models that they serve. Runs on the bus thread.

A request that names no model goes to the model that its client resolved first. Workers that come and go never change
it. The stored desired states name the models of a fleet, also models whose workers are all gone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from datetime import datetime
from typing import Final, Generic, TypeVar

from ...schemas.acks import Ack
from ...schemas.checks import check_name, list_names
from ...schemas.control import DesiredState
from ...schemas.errors import BusBroken, InvalidRequest, NoWorkers, RemoteProtocolError, RollbusError
from ...schemas.limits import Recent
from ...schemas.messages import decode_presence
from ...schemas.presence import WorkerPresence, WorkerState
from ..control.store import DesiredStore
from ..logs import RejectionCount
from ..nats.connection import Connection, names_of_subscribers, publish
from ..nats.failures import describe_reachable
from ..nats.jetstream import Unanswered
from ..nats.library import Msg
from ..protocol.fleet.desired import desired_loras, effective, shows_ack
from ..protocol.fleet.presence import LostWorker, PresenceTable, Survivor, accepts_whole_requests
from ..queue.publisher import QueueProbes
from ..queue.streams import QueueDepth, delete_queue, queue_depths
from ..subjects import CLIENT_CONNECTION, WORKER_CONNECTION, Subjects
from .calls import Call
from .config import MAX_MODELS, ClientConfig
from .coordinator import AttemptCoordinator

logger = logging.getLogger(__name__)

T = TypeVar("T")
PING_WAIT_S = 0.5
"""Seconds in which a live worker answers a ping: a thousand round trips on a loopback."""
FIRST_WAIT_S = PING_WAIT_S
"""Seconds from the start of a watch until the answers to its first ping are complete."""
KNOWN_AFTER_S: Final = 5.0
"""Seconds from the start of a watch after which it knows all live workers: they publish presence when they start, once
a second, and when they are asked."""
READ_S: Final = 1.0
"""Seconds between two reads of all stored states for names that no worker has, because any user may send such names."""
LOADED_S: Final = 1.0
"""Seconds to wait for the presence of a worker with a recorded adapter. It usually arrives within milliseconds."""
NOTIFY_S: Final = 20e-6
"""Seconds for each worker that a snapshot waits for further presence: none below the loop's millisecond. To make one
takes a twentieth of that. A command to 1,000 workers must not make one for each answer."""
WARN_AFTER_S: Final = 10.0
"""Seconds. A weight update pauses a fleet for a few seconds. A longer pause may have been forgotten."""
ROUND_S: Final = 0.5
"""Seconds between two checks for requests that wait because of a pause."""


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
        self._is_notifying = False
        self._pinged_at = -PING_WAIT_S
        self._listening_since = -FIRST_WAIT_S
        # True if no call has read the answers to the ping of this watch.
        self._is_unread = False
        self._connected: _SharedRead[frozenset[str] | None] = _SharedRead()
        # For each caller that waits for answers, the known workers that have not answered.
        self._silent: list[set[tuple[str, str]]] = []
        self.snapshot = self.table.snapshot
        self.client: str | None = None
        self.rejected = RejectionCount()
        self._probes = QueueProbes(nats, subjects)

    def receive(self, message: Msg) -> None:
        """Process a presence message."""
        try:
            presence = decode_presence(message.data)
            if message.subject != self.subjects.presence(presence.worker):
                raise RemoteProtocolError(f"worker {presence.worker} published presence on {message.subject}")
        except RemoteProtocolError as exc:
            self.rejected.warn(logger, "presence.rejected subject=%s so_far=%s error=%s", message.subject, exc)
            return
        num_before = len(self.table.incarnations_of(presence.worker))
        change = self.table.update(presence, time.monotonic())
        self._on_heard(presence)
        for silent in self._silent:
            silent.discard((presence.worker, presence.incarnation))
            if not silent:
                self._changed.set()
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
        # A large fleet changes its state at once: one snapshot shows all presence that has arrived. Attempts that are
        # lost with a worker must not go to a model that it has served alone.
        if change is not None:
            self._notify()
        elif not self._is_notifying:
            self._is_notifying = True
            asyncio.get_running_loop().call_later(len(self.snapshot.workers) * NOTIFY_S, self._notify)

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
        self._is_notifying = False
        if self.table.snapshot is not self.snapshot:
            self.snapshot = self.table.snapshot
            self._changed.set()
            self._on_change()

    async def restart_watch(self) -> None:
        """Restart all leases after an outage, and ask all workers for their presence."""
        self.table.restart_leases(time.monotonic())
        self._pinged_at = -PING_WAIT_S
        self._listening_since = time.monotonic()
        self._is_unread = True
        await self._ping()

    async def known_workers(self) -> tuple[WorkerPresence, ...]:
        """Return the latest presence of live workers, after all have answered since the watch began.

        If the server does not tell which workers are connected to it, wait until all had time to answer.
        """
        if self._first_left_s() > 0:
            names = await self._connected.get(self._connected_workers)
            await self.wait_until(lambda: bool(names) and all(map(self.table.get, names or ())), self._first_left_s())
        return self.table.workers()

    def _first_left_s(self) -> float:
        return self._listening_since + FIRST_WAIT_S - time.monotonic()

    async def _connected_workers(self) -> frozenset[str] | None:
        """Return the ids of the connected workers. None: other programs may answer pings. Empty: unknown, or none."""
        # A worker that is flooded with pings does not receive them for some seconds, but it receives commands.
        subjects = self.subjects.ping, self.subjects.control(self.client or "~")
        found = await names_of_subscribers(self._nats, *subjects)
        names = [name for name in found or () if not name.startswith(CLIENT_CONNECTION)]
        if not all(name.startswith(WORKER_CONNECTION) for name in names):
            return None
        return frozenset(name.removeprefix(WORKER_CONNECTION) for name in names)

    def live_incarnations(self) -> frozenset[tuple[str, str]]:
        """Return worker and incarnation of all live workers that have not fenced themselves."""
        return self.table.incarnations()

    async def wait_for_acked(self, acks: Collection[Ack], timeout_s: float) -> None:
        """Wait until presence shows what these acks of recorded commands say, for at most `timeout_s` seconds."""
        await self.wait_until(lambda: all(shows_ack(self.table.get(ack.worker), ack) for ack in acks), timeout_s)

    async def ping_workers(self) -> tuple[WorkerPresence, ...]:
        """Ask all workers for their state, and return the answers of the next half second, or of a new watch.

        A watch that knows all live workers waits only until each has answered.

        Raises:
            BusBroken: the connection to NATS is gone.
        """
        is_first, self._is_unread = self._is_unread and self._first_left_s() > 0, False
        if is_first:
            return await self.known_workers()
        silent = set(self.table.incarnations())
        # A young watch, or one without workers, waits for workers that it does not know.
        is_known = bool(silent) and time.monotonic() - self._listening_since > KNOWN_AFTER_S
        self._silent.append(silent)
        try:
            await self._ping()
            await self.wait_until(lambda: is_known and not silent, PING_WAIT_S)
        finally:
            self._silent = [one for one in self._silent if one is not silent]
        return self.table.workers()

    async def queues(self) -> tuple[tuple[QueueDepth, ...], dict[str, str]]:
        """Return the waiting requests for the live workers, and by model the reason why a queue does not answer."""
        models = self._models()
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
        return await self._probes.problems(client, self._models())

    def _models(self) -> list[str]:
        return sorted({worker.model for worker in self.table.workers() if accepts_whole_requests(worker)})

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
        with suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0)):
                while not is_met():
                    self._changed.clear()
                    await self._changed.wait()
        # The caller may read the snapshot next: it must not be older than what was waited for.
        self._notify()
        return is_met()


class PauseWarnings:
    """Tracks which models are paused. It logs once for each pause that requests of this client wait for its end."""

    def __init__(self, watcher: PresenceWatcher, coordinator: AttemptCoordinator, store: DesiredStore) -> None:
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = store
        # Models with a paused worker and without a serving worker, as of the last change of the fleet.
        self._paused: set[str] = set()
        # Time since which each of them is paused, and the seconds of the pauses that have ended, by model. Workers
        # choose the names of their models, and may change them.
        self._paused_since: dict[str, float] = {}
        self._paused_s = Recent[str, float](MAX_MODELS)
        # Time since which requests wait for the end of the pause, by model.
        self._waiting: dict[str, float] = {}
        # Models whose present pause was logged.
        self._told: set[str] = set()

    def update_paused(self) -> None:
        """Find the paused models, and remove pauses that have ended.

        Call this when a worker joins, leaves or changes its state.
        """
        fleet = self._watcher.snapshot
        states = {(worker.model, worker.state) for worker in fleet.workers if accepts_whole_requests(worker)}
        self._paused = {model for model, state in states if state is WorkerState.PAUSED} - fleet.serving
        now, since = time.monotonic(), self._paused_since
        for model in since.keys() - self._paused:
            self._paused_s[model] = self._paused_s.get(model, 0.0) + now - since[model]
        self._paused_since = {model: since.get(model, now) for model in self._paused}
        self._told &= self._paused
        self._waiting = {model: since for model, since in self._waiting.items() if model in self._paused}

    def paused_s(self) -> dict[str, float]:
        """Return for how many seconds each model has been paused so far."""
        now, since = time.monotonic(), self._paused_since
        return {
            model: self._paused_s.get(model, 0.0) + now - since.get(model, now) for model in {**self._paused_s, **since}
        }

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
        return max(filter(None, times), default=None)


class ModelNames:
    """The models that a client knows.

    Attributes:
        fixed: the model of requests that name none. None until the first of them is resolved. It never changes
            afterwards, so any thread may read it.
    """

    def __init__(self, nats: Connection, config: ClientConfig, watcher: PresenceWatcher, store: DesiredStore) -> None:
        self.fixed: str | None = None
        self._nats = nats
        self._subjects = config.subjects
        self._wait_s = config.wait_for_workers_s
        self._watcher = watcher
        self._store = store
        self._recorded_models: _SharedRead[tuple[str, ...]] = _SharedRead()
        self._recorded_states: _SharedRead[dict[str, DesiredState]] = _SharedRead()

    async def known(self) -> tuple[str, ...]:
        """Return the models that live workers or stored desired states name, sorted.

        Raises:
            BusBroken: the stored states cannot be listed or read.
        """
        await self._watcher.known_workers()
        recorded = await self._recorded_models.get(self._store.models)
        served = {worker.model for worker in self._watcher.table.workers()}
        return await self._store.known_models(served, recorded)

    async def with_adapter(self, name: str) -> tuple[str, ...]:
        """Return the models for which an adapter is recorded. Wait up to a second for a worker that announces it.

        Raises:
            BusBroken: the stored states cannot be read.
        """
        states = await self._recorded_states.get(self._store.read_all, every_s=READ_S)
        found = tuple(sorted(model for model, state in states.items() if name in desired_loras(state)))
        if found:
            await self._watcher.wait_until(lambda: self._is_announced(name, found), LOADED_S)
        return found

    def _is_announced(self, name: str, models: tuple[str, ...]) -> bool:
        workers = (worker for worker in self._watcher.snapshot.workers if worker.model in models)
        return any(lora.name == name for worker in workers for lora in worker.loras)

    async def reset(self, model: str | None) -> tuple[str, ...]:
        """Clear the desired state of `model`, or of all models. Return the models that had recorded commands."""
        models = await self._store.models() if model is None else (check_name("model", model),)
        return tuple([name for name in models if await self._store.reset(name)])

    async def forget(self, model: str) -> bool:
        """Delete the queue and the desired state of a model that has no workers. Return False if it was unknown.

        Raises:
            InvalidRequest: the model has workers, or its queue has requests. Nothing was deleted.
            BusBroken: the connection or JetStream failed, or this user may not delete them. A repetition continues.
        """
        check_name("model", model)
        workers = [worker.worker for worker in await self._watcher.ping_workers() if worker.model == model]
        if workers:
            allowed = "a model without workers"
            raise InvalidRequest("model", f"{model!r} has workers: {list_names(workers)}", allowed)
        depths = await queue_depths(self._nats, self._subjects, (model,))
        held = sum(depth.waiting + depth.in_hand for depth in depths)
        if held:
            problem = f"{model!r} has {held} requests in its queue"
            raise InvalidRequest("model", problem, "a model with an empty queue")
        was_known = bool(depths) or model in await self._recorded_models.get(self._store.models)
        # The state is deleted last. Until then the model is known, and the command can be repeated.
        await delete_queue(self._nats, self._subjects, model)
        await self._store.forget(model)
        return was_known

    async def resolve(self, model: str | None, call: Call) -> str:
        """Return the model that serves a request for `model`. Ask the workers first if none seems to serve it.

        With `wait_for_workers_s`, a known model needs no worker now, and a fleet without any model is waited for.

        Args:
            call: the request. If it is aborted, this waits no longer.

        Raises:
            NoWorkers: no worker serves the model, and none starts.
            InvalidRequest: no model was named and several are known, or only other models are known.
            BusBroken: no model was named, and the stored states cannot be listed.
        """
        try:
            return await self._resolve(self.fixed if model is None else model, call)
        except NoWorkers as exc:
            if self._nats.is_connected:
                raise
            raise NoWorkers(message=f"{exc.message}; the connection to NATS is down") from exc

    async def _resolve(self, model: str | None, call: Call) -> str:
        if model is None:
            model = await self._wait_fixed(call)
        await self._watcher.wait_awaited(model)
        known: tuple[str, ...] = (model,)
        if all(worker.model != model for worker in self._watcher.snapshot.workers):
            # If they cannot be read, it may be known. A request that fails as `no_workers` may be sent again.
            with suppress(BusBroken):
                known = await self._recorded_models.get(self._store.models)
        try:
            return self._watcher.snapshot.resolve_model(model, known)
        except NoWorkers:
            if not self._wait_s:
                raise
            return model

    async def _wait_fixed(self, call: Call) -> str:
        """Choose the model of requests that name none, once. Wait for the fleet's first model if that is allowed."""
        until = min(time.monotonic() + self._wait_s, call.deadline_s)
        while True:
            try:
                return await self._fix()
            except NoWorkers:
                if call.is_aborted or time.monotonic() >= until:
                    raise
            await asyncio.sleep(PING_WAIT_S)

    async def _fix(self) -> str:
        """Choose the model of requests that name none, once."""
        try:
            known = await self.known()
        except BusBroken:
            if self._nats.is_connected:
                raise
            raise NoWorkers(message="the models of the fleet are unknown") from None
        if self.fixed is None:
            self.fixed = self._watcher.snapshot.choose_model(known)
        return self.fixed


class _SharedRead(Generic[T]):
    """A read whose result or error calls share that wait at the same time."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._tried_at = self._read_at = -math.inf
        self._found: T
        self._error: RollbusError | None

    async def get(self, read: Callable[[], Awaitable[T]], *, every_s: float = 0.0) -> T:
        """Return what a read finds that begins after this call, and `every_s` seconds after the last one."""
        asked_at = time.monotonic()
        async with self._reading:
            if self._read_at < asked_at:
                await asyncio.sleep(max(self._tried_at + every_s - time.monotonic(), 0.0))
                self._tried_at = began_at = time.monotonic()
                try:
                    self._found, self._error = await read(), None
                except RollbusError as exc:
                    # Each of a thousand requests would wait for the errors of all before it.
                    self._error = exc
                self._read_at = began_at
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._found
