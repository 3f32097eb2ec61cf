"""The live workers, by their presence. The caller passes in the time; nothing here waits."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ....schemas.presence import WorkerPresence, WorkerState
from .fleet_snapshot import FleetSnapshot, accepts_whole_requests, cause_of
from .lease import MAX_LEASE_S

__all__ = ["LEASE_MARGIN_S", "MAX_WORKERS", "LostWorker", "PresenceTable", "Survivor", "slots_of"]

LEASE_MARGIN_S: Final = 1.0
"""Seconds after the end of its lease at which a worker counts as lost. By then it has fenced itself by any clock."""
MAX_ENDED: Final = 8
"""Ended incarnations of one worker that are remembered: a worker starts rarely."""
MAX_NAMESAKES: Final = 4
"""Further workers with one id that are followed. More than one worker with an id is a mistake in their setup."""
MAX_WORKERS: Final = 16_384
"""Workers that are followed, far above any fleet. Further workers are ignored until one is lost."""
MAX_GIVEN_UP: Final = 64
"""Models without workers whose last cause is remembered: workers choose the names."""


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


class PresenceTable:
    """The latest presence of each live worker.

    Two workers may have one id by mistake. A new incarnation replaces the previous one, because a restarted worker
    cannot report its restart in another way. If presence of the replaced incarnation arrives again, both are live. From
    then on, the table keeps the worker that has held the id longer, and the client's requests at both workers continue.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Tracked] = {}
        # The incarnation of each worker whose lease expired, and the time of its last presence; bounded.
        self._silent: OrderedDict[str, tuple[str, float]] = OrderedDict()
        # By worker: incarnations that were replaced, and those that are live beside the one in `_workers`.
        self._ended: dict[str, deque[str]] = {}
        self._namesakes: dict[str, dict[str, _Tracked]] = {}
        # By worker: the incarnation that started last, and how many started since it accepted requests; bounded.
        self._starts: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._given_up: OrderedDict[str, str] = OrderedDict()
        self._snapshot: FleetSnapshot | None = None

    def __repr__(self) -> str:
        """Return one line with each worker and its state."""
        return f"<PresenceTable {' '.join(f'{p.worker}:{p.state}' for p in self.workers()) or 'empty'}>"

    def update(self, presence: WorkerPresence, now: float) -> LostWorker | Survivor | None:
        """Handle presence. Return the incarnation or worker that it ended, or the worker that has survived."""
        previous = self.get(presence.worker)
        if previous is not None and self._is_namesake(previous, presence):
            return self._update_namesake(previous, presence, now)
        silent = self._silent.pop(presence.worker, None)
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED):
            lost = self._end(presence, f"it is {presence.state}", is_death=presence.state is WorkerState.FAILED)
            if presence.start_left_s == 0:
                self._give_up(presence)
            return lost
        if previous is None and len(self._workers) >= MAX_WORKERS:
            return None
        self._workers[presence.worker] = _Tracked(presence, now)
        self._count_start(presence)
        if previous is None or _in_snapshot(previous) != _in_snapshot(presence):
            self._given_up.pop(presence.model, None)
            self._snapshot = None
        if previous is not None and previous.incarnation != presence.incarnation:
            self._ended.setdefault(presence.worker, deque(maxlen=MAX_ENDED)).append(previous.incarnation)
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
        for worker, namesakes in list(self._namesakes.items()):
            expired = [name for name, other in namesakes.items() if other.expires <= now]
            gone += [self._end_namesake(worker, name, "its lease expired", is_death=True) for name in expired]
        for tracked in [tracked for tracked in self._workers.values() if tracked.expires <= now]:
            self._silent[tracked.presence.worker] = tracked.presence.incarnation, tracked.received_at
            gone.append(self._end(tracked.presence, "its lease expired", is_death=True))
        while len(self._silent) > MAX_WORKERS:
            self._silent.popitem(last=False)
        return gone

    def remove_all(self, reason: str) -> list[LostWorker]:
        """Remove and return all workers: no presence could arrive for longer than requests wait for a worker."""
        gone = [LostWorker(p.worker, p.incarnation, p.model, reason) for p in self.workers()]
        for lost in gone:
            self._remove(lost.worker)
        return gone

    def _is_namesake(self, previous: WorkerPresence, presence: WorkerPresence) -> bool:
        """Return True if `presence` is of another worker than `previous`, and both are or were live until now."""
        if presence.incarnation == previous.incarnation:
            return False
        worker, incarnation = presence.worker, presence.incarnation
        return incarnation in self._ended.get(worker, ()) or incarnation in self._namesakes.get(worker, {})

    def _update_namesake(
        self, previous: WorkerPresence, presence: WorkerPresence, now: float
    ) -> LostWorker | Survivor | None:
        """Handle presence of another worker with the id of `previous`."""
        worker, incarnation = presence.worker, presence.incarnation
        others = self._namesakes.setdefault(worker, {})
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED, WorkerState.FENCED):
            if incarnation not in others:
                return None
            is_death = presence.state is WorkerState.FAILED
            return self._end_namesake(worker, incarnation, f"it is {presence.state}", is_death=is_death)
        if incarnation not in others and len(others) >= MAX_NAMESAKES:
            return None
        others[incarnation] = _Tracked(presence, now)
        ended = self._ended.get(worker, deque())
        if incarnation not in ended:
            return None
        ended.remove(incarnation)
        if _held_s(presence) > _held_s(previous):
            others[previous.incarnation] = self._workers[worker]
            self._workers[worker] = others.pop(incarnation)
            self._snapshot = None
        # It counted as lost when presence of the other one arrived.
        return Survivor(worker, incarnation)

    def _end_namesake(self, worker: str, incarnation: str, reason: str, *, is_death: bool) -> LostWorker:
        model = self._namesakes[worker].pop(incarnation).presence.model
        return LostWorker(worker, incarnation, model, reason, is_final=False, is_death=is_death)

    def _end(self, presence: WorkerPresence, reason: str, *, is_death: bool) -> LostWorker:
        """End a worker, or one of several with its id."""
        worker = presence.worker
        others = self._namesakes.get(worker, {})
        followed = self.get(worker) if others else None
        ended = (followed or presence).incarnation
        self._remove(worker)
        if others:
            longest = max(others.values(), key=lambda other: _held_s(other.presence))
            del others[longest.presence.incarnation]
            self._namesakes[worker] = others
            self._workers[worker] = longest
        return LostWorker(
            worker, ended, presence.model, reason, is_final=worker not in self._workers, is_death=is_death
        )

    def restart_leases(self, now: float) -> None:
        """Restart every lease: no presence could arrive while this process was disconnected."""
        for tracked in chain(self._workers.values(), *(others.values() for others in self._namesakes.values())):
            tracked.restart_lease(now)

    def incarnations_of(self, worker: str) -> frozenset[str]:
        """Return all live incarnations of `worker`: more than one if several workers have its id."""
        seen = self.get(worker)
        own = () if seen is None else (seen.incarnation,)
        return frozenset((*own, *self._namesakes.get(worker, ())))

    def incarnations(self) -> frozenset[tuple[str, str]]:
        """Return worker and incarnation of all live workers that have not fenced themselves."""
        own = ((p.worker, p.incarnation) for p in self.workers() if p.state is not WorkerState.FENCED)
        others = ((worker, name) for worker, others in self._namesakes.items() for name in others)
        return frozenset((*own, *others))

    @property
    def snapshot(self) -> FleetSnapshot:
        """The live workers; the same object until a worker joins, leaves or applies a change."""
        if self._snapshot is None:
            starts = {worker: self._starts[worker][1] for worker in self._workers if worker in self._starts}
            self._snapshot = FleetSnapshot(self.workers(), starts, dict(self._given_up))
        return self._snapshot

    def workers(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Return the live workers by id, of one model or of all."""
        return tuple(t.presence for _, t in sorted(self._workers.items()) if model in (None, t.presence.model))

    def heard(self) -> tuple[tuple[WorkerPresence, float], ...]:
        """Return the live workers by id, each with the time of its last presence."""
        return tuple((t.presence, t.received_at) for _, t in sorted(self._workers.items()))

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
        tracked = self._workers.get(worker)
        return None if tracked is None else tracked.presence

    def _remove(self, worker: str) -> None:
        self._snapshot = None
        self._workers.pop(worker, None)
        self._ended.pop(worker, None)
        self._namesakes.pop(worker, None)


def _in_snapshot(presence: WorkerPresence) -> tuple[object, ...]:
    """Return the values of which each change makes a new snapshot."""
    p = presence
    start = (bool(p.start_left_s), p.last_error) if p.state is WorkerState.STARTING else ()
    return p.state, p.model, p.incarnation, p.epoch, p.weight_version, p.loras, start


def _held_s(presence: WorkerPresence) -> float:
    """Return how long a worker has held its id, by its presence."""
    return presence.uptime_s if presence.held_s is None else presence.held_s


def slots_of(worker: WorkerPresence) -> int:
    """Return how many requests a worker runs at once, by its presence."""
    known = worker.capabilities
    return worker.in_flight + worker.free_slots if known is None else known.max_num_seqs
