"""The live workers, by their presence: their leases, the models that they serve, and the requests that wait for one.

The caller passes in the time; nothing here waits.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from ....schemas.checks import list_names
from ....schemas.errors import InvalidRequest, NoWorkers
from ....schemas.presence import WorkerPresence, WorkerRole, WorkerState
from ....schemas.weights import OpenTransfer
from .leases import LEASE_MARGIN_S, MAX_LEASE_S

MAX_CAUSE_CHARS: Final = 256
"""Characters of a worker's own text that an error repeats: a worker may write any text."""
MAX_ENDED: Final = 8
"""Ended incarnations of one worker that are remembered: a worker starts rarely."""
MAX_NAMESAKES: Final = 4
"""Further workers with one id that are followed. More than one worker with an id is a mistake in their setup."""
MAX_WORKERS: Final = 16_384
"""Workers that are followed, far above any fleet. Further workers are ignored until one is lost."""
MAX_GIVEN_UP: Final = 64
"""Models without workers whose last cause is remembered: workers choose the names."""


def by_model(workers: Iterable[WorkerPresence], models: Iterable[str] = ()) -> dict[str, list[WorkerPresence]]:
    """Return the workers of each model, also of `models`, which may have none."""
    found: dict[str, list[WorkerPresence]] = {model: [] for model in models}
    for worker in workers:
        found.setdefault(worker.model, []).append(worker)
    return found


def open_transfers(workers: Iterable[WorkerPresence]) -> dict[str, tuple[OpenTransfer, list[str]]]:
    """Return each open transfer by its id, as its first worker announces it, with all its workers."""
    found: dict[str, tuple[OpenTransfer, list[str]]] = {}
    for worker in workers:
        if worker.transfer is not None:
            found.setdefault(worker.transfer.id, (worker.transfer, []))[1].append(worker.worker)
    return found


@dataclass(frozen=True)
class FleetSnapshot:
    """The live workers: states, versions, adapters. Each change makes a new snapshot; any thread may read it."""

    workers: tuple[WorkerPresence, ...]
    """The workers by id. Load, counters and times of their presence may be older than the snapshot."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """By worker that starts: how many of its incarnations have started since it last accepted requests."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """By model whose last worker is not started again: the name of that worker and the reason."""

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The sorted models for which a worker accepts requests now or soon: the worker may be paused or updating."""
        return tuple(sorted({w.model for w in self.workers if w.state.is_present and accepts_whole_requests(w)}))

    @cached_property
    def awaited(self) -> frozenset[str]:
        """The models for which a worker accepts requests now or soon: it may also be starting."""
        starting = (w.model for w in self.workers if w.state is WorkerState.STARTING and w.start_left_s)
        return frozenset((*self.served, *starting))

    @cached_property
    def serving(self) -> frozenset[str]:
        """The models for which a worker accepts requests and runs them now."""
        return frozenset(w.model for w in self.workers if w.state is WorkerState.SERVING and accepts_whole_requests(w))

    @cached_property
    def prefillers(self) -> Mapping[str, tuple[str, ...]]:
        """By model with serving decode workers: the serving prefill workers whose KV the decode workers can read."""
        readable: dict[str, set[str | None]] = {}
        for worker in self.workers:
            if _serves_as(worker, "decode"):
                readable.setdefault(worker.model, set()).add(connector_of(worker))
        return {
            model: tuple(
                worker.worker
                for worker in self.workers
                if worker.model == model and _serves_as(worker, "prefill") and connector_of(worker) in connectors
            )
            for model, connectors in readable.items()
        }

    @cached_property
    def context_lens(self) -> Mapping[str, int]:
        """By model with serving workers: the shortest context length of any of them."""
        lens: dict[str, int] = {}
        for worker in self.workers:
            if worker.state is WorkerState.SERVING and worker.capabilities is not None:
                length = worker.capabilities.max_model_len
                lens[worker.model] = min(lens.get(worker.model, length), length)
        return lens

    def newest_version(self, model: str | None, lora: str | None) -> int | None:
        """Return the newest version of the weights or adapter at any live worker of `model`; None: unknown."""
        workers = [worker for worker in self.workers if worker.model == model]
        if lora is None:
            return max((worker.served_version for worker in workers), default=None)
        return max((info.version for worker in workers for info in worker.loras if info.name == lora), default=None)

    def choose_model(self, known: Collection[str] = ()) -> str:
        """Return the model of requests that name none: the only one of the live workers' models and `known`.

        Raises:
            NoWorkers: there is no model.
            InvalidRequest: there are several.
        """
        names = self._list_names(known)
        if len(names) > 1:
            raise InvalidRequest(field="model", problem="is missing", allowed=self._describe_allowed(names))
        if not names:
            raise NoWorkers(message="no live worker serves any model")
        return names[0]

    def resolve_model(self, model: str | None, known: Collection[str] = ()) -> str:
        """Return the model for a request with `model`; None means the only model.

        Args:
            known: models that count although no live worker may have them.

        Raises:
            NoWorkers: no worker serves it, and none starts.
            InvalidRequest: no model was named and there are several, or there are only other models.
        """
        model = self.choose_model(known) if model is None else model
        if model in self.awaited:
            return model
        names = self._list_names(known)
        if names and model not in names:
            raise InvalidRequest(field="model", problem=f"is {model!r}", allowed=self._describe_allowed(names))
        raise NoWorkers(message=f"no live worker serves {model}{self.describe_others(model)}")

    def _list_names(self, known: Collection[str]) -> list[str]:
        return sorted({worker.model for worker in self.workers}.union(known))

    def _describe_allowed(self, names: Sequence[str]) -> str:
        """Return the allowed names for people, with the command that forgets a name without workers."""
        live = {worker.model for worker in self.workers}
        idle = [name for name in names if name not in live]
        text = f"one of {list_names(names)}"
        if idle:
            text += f" (without workers: {list_names(idle)}; `rollbus forget-model {idle[0]}` forgets a model)"
        return text

    def describe_others(self, model: str | None) -> str:
        """Return the workers of `model`, or of all, that do not serve, with states and causes, in brackets.

        The text may be empty.
        """
        others = [
            self._describe(worker)
            for worker in self.workers
            if not (worker.state is WorkerState.SERVING and accepts_whole_requests(worker))
            and model in (None, worker.model)
        ]
        others += [why for name, why in self.given_up.items() if model in (None, name)]
        return f" ({list_names(others, '; ')})" if others else ""

    def _describe(self, worker: WorkerPresence) -> str:
        """Return the state of a worker that does not serve. A start has its number and its cause."""
        if not accepts_whole_requests(worker):
            return f"{worker.worker} is serving prefill phases only"
        if worker.state is not WorkerState.STARTING:
            return f"{worker.worker} is {worker.state}"
        count = self.starts.get(worker.worker, 1)
        again = f", start {count} since it served" if count > 1 else ""
        why = f": {cause_of(worker)}" if worker.last_error else ""
        return f"{worker.worker} is starting{again}{why}"


def cause_of(worker: WorkerPresence) -> str:
    """Return the printable beginning of the last error of a worker."""
    return "".join(filter(str.isprintable, (worker.last_error or "")[:MAX_CAUSE_CHARS]))


def accepts_whole_requests(worker: WorkerPresence) -> bool:
    """Return True if the worker pulls requests from the queue when it serves, and not only prefill phases."""
    return worker.capabilities is None or worker.capabilities.role != "prefill"


def _serves_as(worker: WorkerPresence, role: WorkerRole) -> bool:
    capabilities = worker.capabilities
    return worker.state is WorkerState.SERVING and capabilities is not None and capabilities.role == role


def connector_of(worker: WorkerPresence) -> str | None:
    """Return the connector by which a worker shares KV; None: it shares none, or is starting."""
    return None if worker.capabilities is None else worker.capabilities.kv_connector


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker, or one of its incarnations, that is lost."""

    worker: str
    incarnation: str
    model: str
    reason: str
    is_final: bool = True
    """True if the worker itself is lost. False: it continues, or comes back, as another incarnation."""
    is_death: bool = False
    """True if its engine died or its process was killed, as far as is known. A request in the engine may be the cause.
    """


@dataclass(frozen=True, slots=True)
class Survivor:
    """A worker whose lease had expired but whose process had not ended. Its presence arrives again."""

    worker: str
    incarnation: str
    """The incarnation that counted as lost."""


@dataclass(slots=True)
class _Tracked:
    """The latest presence of one incarnation, and its lease."""

    presence: WorkerPresence
    received_at: float
    expires: float = 0.0

    def __post_init__(self) -> None:
        """Start the lease."""
        self.restart_lease(self.received_at)

    def restart_lease(self, now: float) -> None:
        """Restart the lease at `now`."""
        self.expires = now + min(self.presence.lease_s, MAX_LEASE_S) + LEASE_MARGIN_S

    @property
    def held_s(self) -> float:
        """How long the worker has held its id, by its presence."""
        return self.presence.uptime_s if self.presence.held_s is None else self.presence.held_s


@dataclass(slots=True)
class _Worker:
    """One id: the incarnation that is followed, those that are live beside it, and those that were replaced."""

    followed: _Tracked
    others: dict[str, _Tracked] = field(default_factory=dict)
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))

    def is_namesake(self, presence: WorkerPresence) -> bool:
        """Return True if presence is of another worker than the followed one, and both are or were live."""
        followed, incarnation = self.followed.presence, presence.incarnation
        # A fence begins an incarnation of the same process. One that was stopped for long does not end its successor.
        is_own = (presence.host, presence.pid) == (followed.host, followed.pid)
        is_stray = presence.state is WorkerState.FENCED and not is_own
        return incarnation != followed.incarnation and (is_stray or incarnation in (*self.replaced, *self.others))


class PresenceTable:
    """The latest presence of each live worker.

    Two workers may have one id by mistake. A new incarnation replaces the previous one, because a restarted worker
    cannot report its restart in another way. If presence of the replaced incarnation arrives again, both are live. From
    then on, the table keeps the worker that has held the id longer, and the client's requests at both workers continue.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        # The incarnation of each worker whose lease expired, and the time of its last presence; bounded.
        self._silent: OrderedDict[str, tuple[str, float]] = OrderedDict()
        # By worker: the incarnation that started last, and how many started since it accepted requests; bounded.
        self._starts: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._given_up: OrderedDict[str, str] = OrderedDict()
        self._snapshot: FleetSnapshot | None = None

    def update(self, presence: WorkerPresence, now: float) -> LostWorker | Survivor | None:
        """Handle presence. Return the incarnation or worker that it ended, or the worker that has survived."""
        known = self._workers.get(presence.worker)
        if known and known.is_namesake(presence):
            return self._update_namesake(known, presence, now)
        silent = self._silent.pop(presence.worker, None)
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED):
            lost = self._end(presence, f"it is {presence.state}", is_death=presence.state is WorkerState.FAILED)
            if presence.start_left_s == 0:
                self._give_up(presence)
            return lost
        previous = None if known is None else known.followed.presence
        if known is not None:
            known.followed = _Tracked(presence, now)
        elif len(self._workers) < MAX_WORKERS:
            known = self._workers[presence.worker] = _Worker(_Tracked(presence, now))
        else:
            return None
        self._count_start(presence)
        if previous is None or _pick_snapshot_values(previous) != _pick_snapshot_values(presence):
            self._given_up.pop(presence.model, None)
            self._snapshot = None
        if previous is not None and previous.incarnation != presence.incarnation:
            known.replaced.append(previous.incarnation)
            reason = "it came back as a new incarnation"
            # A worker that has fenced itself is the same process. A restarted worker has a shorter uptime.
            is_death = presence.uptime_s < previous.uptime_s and previous.state is not WorkerState.FENCED
            return LostWorker(
                previous.worker, previous.incarnation, previous.model, reason, is_final=False, is_death=is_death
            )
        if silent is not None and now - presence.uptime_s < silent[1]:
            return Survivor(presence.worker, silent[0])
        if presence.state is WorkerState.FENCED:
            reason = "it has fenced itself"
            return LostWorker(presence.worker, presence.incarnation, presence.model, reason, is_final=False)
        return None

    def _count_start(self, presence: WorkerPresence) -> None:
        """Count the starts of a worker until it accepts requests."""
        worker, incarnation = presence.worker, presence.incarnation
        if presence.state is WorkerState.STARTING:
            last, count = self._starts.pop(worker, ("", 0))
            self._starts[worker] = incarnation, count + (last != incarnation)
            if len(self._starts) > MAX_WORKERS:
                self._starts.popitem(last=False)
        elif presence.state.is_present:
            self._starts.pop(worker, None)

    def _give_up(self, presence: WorkerPresence) -> None:
        """Remember why the last worker of its model is not started again, for the requests that wait for one."""
        if presence.model in self.snapshot.awaited:
            return
        self._snapshot = None
        self._given_up[presence.model] = f"{presence.worker} is not started again: {cause_of(presence)}"
        if len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    def expire(self, now: float) -> list[LostWorker]:
        """Remove and return the workers whose lease has expired."""
        gone = []
        for known in list(self._workers.values()):
            expired = [name for name, other in known.others.items() if other.expires <= now]
            gone += [_end_namesake(known, name, "its lease expired", is_death=True) for name in expired]
            followed = known.followed
            if followed.expires <= now:
                self._silent[followed.presence.worker] = followed.presence.incarnation, followed.received_at
                gone.append(self._end(followed.presence, "its lease expired", is_death=True))
        while len(self._silent) > MAX_WORKERS:
            self._silent.popitem(last=False)
        return gone

    def remove_all(self, reason: str) -> list[LostWorker]:
        """Remove and return all workers: no presence could arrive for longer than requests wait for a worker."""
        gone = [LostWorker(p.worker, p.incarnation, p.model, reason) for p in self.workers()]
        if gone:
            self._workers.clear()
            self._snapshot = None
        return gone

    def _update_namesake(self, known: _Worker, presence: WorkerPresence, now: float) -> LostWorker | Survivor | None:
        """Handle presence of another worker with the id of the followed one."""
        incarnation = presence.incarnation
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED, WorkerState.FENCED):
            if incarnation not in known.others:
                if incarnation not in known.replaced:
                    known.replaced.append(incarnation)
                return None
            is_death = presence.state is WorkerState.FAILED
            return _end_namesake(known, incarnation, f"it is {presence.state}", is_death=is_death)
        if incarnation not in known.others and len(known.others) >= MAX_NAMESAKES:
            return None
        tracked = known.others[incarnation] = _Tracked(presence, now)
        if incarnation not in known.replaced:
            return None
        known.replaced.remove(incarnation)
        if tracked.held_s > known.followed.held_s:
            known.others[known.followed.presence.incarnation] = known.followed
            known.followed = known.others.pop(incarnation)
            self._snapshot = None
        # It counted as lost when presence of the other one arrived.
        return Survivor(presence.worker, incarnation)

    def _end(self, presence: WorkerPresence, reason: str, *, is_death: bool) -> LostWorker:
        """End a worker, or one of several with its id. The one that has held the id longest is followed then."""
        self._snapshot = None
        ended, known = presence.incarnation, self._workers.pop(presence.worker, None)
        is_final = known is None or not known.others
        if known is not None and known.others:
            ended = known.followed.presence.incarnation
            longest = max(known.others.values(), key=lambda other: other.held_s)
            del known.others[longest.presence.incarnation]
            self._workers[presence.worker] = _Worker(longest, known.others)
        return LostWorker(presence.worker, ended, presence.model, reason, is_final=is_final, is_death=is_death)

    def restart_leases(self, now: float) -> None:
        """Restart every lease: no presence could arrive while this process was disconnected."""
        for known in self._workers.values():
            for tracked in (known.followed, *known.others.values()):
                tracked.restart_lease(now)

    def incarnations_of(self, worker: str) -> frozenset[str]:
        """Return all live incarnations of `worker`: more than one if several workers have its id."""
        known = self._workers.get(worker)
        return frozenset() if known is None else frozenset((known.followed.presence.incarnation, *known.others))

    def incarnations(self) -> frozenset[tuple[str, str]]:
        """Return worker and incarnation of all live workers that have not fenced themselves."""
        own = ((p.worker, p.incarnation) for p in self.workers() if p.state is not WorkerState.FENCED)
        others = ((worker, name) for worker, known in self._workers.items() for name in known.others)
        return frozenset((*own, *others))

    @property
    def snapshot(self) -> FleetSnapshot:
        """The live workers; the same object until a worker joins, leaves or applies a change."""
        if self._snapshot is None:
            starts = {worker: count for worker, (_, count) in self._starts.items() if worker in self._workers}
            self._snapshot = FleetSnapshot(self.workers(), starts, dict(self._given_up))
        return self._snapshot

    def workers(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Return the live workers by id, of one model or of all."""
        everyone = [known.followed.presence for _, known in sorted(self._workers.items())]
        return tuple(everyone if model is None else (one for one in everyone if one.model == model))

    def heard(self) -> tuple[tuple[WorkerPresence, float], ...]:
        """Return the live workers by id, each with the time of its last presence."""
        everyone = (known.followed for _, known in sorted(self._workers.items()))
        return tuple((tracked.presence, tracked.received_at) for tracked in everyone)

    def serving(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Return the serving workers that accept whole requests."""
        return tuple(p for p in self.workers(model) if p.state is WorkerState.SERVING and accepts_whole_requests(p))

    def target_version(self, model: str) -> int | None:
        """Return the newest version that any live worker of `model` should have; None: no presence has one.

        Of an adapter that answers under the model's name, presence has the loaded version.
        """
        workers = [p for p in self.workers(model) if p.target_version is not None]
        return max((max(p.target_version or 0, p.base_adapter_version or 0) for p in workers), default=None)

    def get(self, worker: str) -> WorkerPresence | None:
        """Return the latest presence of a live worker."""
        known = self._workers.get(worker)
        return None if known is None else known.followed.presence


def _end_namesake(known: _Worker, incarnation: str, reason: str, *, is_death: bool) -> LostWorker:
    lost = known.others.pop(incarnation).presence
    return LostWorker(lost.worker, incarnation, lost.model, reason, is_final=False, is_death=is_death)


def _pick_snapshot_values(presence: WorkerPresence) -> tuple[object, ...]:
    """Return the values of which each change makes a new snapshot."""
    p = presence
    start = (bool(p.start_left_s), p.last_error) if p.state is WorkerState.STARTING else ()
    return p.state, p.model, p.incarnation, p.epoch, p.weight_version, p.loras, start


def slots_of(worker: WorkerPresence) -> int:
    """Return how many requests a worker runs at once, by its presence."""
    known = worker.capabilities
    return worker.in_flight + worker.free_slots if known is None else known.max_num_seqs


class WaitLimit(NamedTuple):
    """How long a request of an HTTP client waits while no worker serves its model."""

    since: float
    """Time at which the request arrived, on `time.monotonic()`."""
    seconds: float
    waited_s: float = 0.0
    """Seconds of the limit that had passed before: the model had no worker that had started."""


class UnservedModels:
    """The models with waiting requests that no worker serves, and since when.

    A request waits for a worker that is paused, updates its weights or starts. If there is no such worker, it waits for
    the grace time, in which a supervisor may start one.

    Args:
        grace_s: seconds that requests wait for a worker of a model that no worker serves and none starts.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._fleet = FleetSnapshot(())
        # By model with waiting requests: the time since which no worker runs requests, and since which none is awaited.
        self._idle: dict[str, float] = {}
        self._abandoned: dict[str, float] = {}

    def update(self, models: Iterable[str], fleet: FleetSnapshot, now: float) -> None:
        """Follow the workers of `models`, the models with waiting requests."""
        self._fleet = fleet
        idle = {model for model in models if model not in fleet.serving}
        self._idle = {model: self._idle.get(model, now) for model in idle}
        self._abandoned = {model: self._abandoned.get(model, now) for model in idle if model not in fleet.awaited}

    def restart_timers(self) -> None:
        """Restart all times: no presence could arrive while this process was disconnected."""
        self._idle.clear()
        self._abandoned.clear()

    def why_not_wait(self, model: str, limit: WaitLimit | None, now: float, *, has_grace: bool = True) -> str | None:
        """Return the reason why a request that no worker has must fail now; None: it waits.

        Args:
            limit: limit of this request; None: it waits until its deadline.
            has_grace: False: the grace time has passed in another way.
        """
        others = self._fleet.describe_others(model)
        since = self._abandoned.get(model)
        if since is not None and model in self._fleet.given_up:
            return f"no worker serves {model}, and none starts{others}"
        if since is not None and (not has_grace or now - since >= self._grace_s):
            return f"no worker has served {model} for {self._grace_s:g} s{others}"
        since = self._idle.get(model)
        if since is not None and limit is not None and now - max(since, limit.since) + limit.waited_s >= limit.seconds:
            return f"no worker has served {model} for {limit.seconds:g} s{others}"
        return None
