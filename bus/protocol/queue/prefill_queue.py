"""Decides which prefill worker gets each request, and which requests wait or go without. The caller passes in the time.

Invariants: a request waits in the prefill queue, is at one worker, or neither. A client has at most as many prefill
phases at a worker as the worker has slots. A request leaves the prefill queue by its deadline, with or without a
worker.
"""

import enum
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

from .placement import rendezvous

FULL_S: Final = 0.05
"""Seconds for which a worker that rejected a prefill phase for lack of room is skipped: prefill phases end meanwhile.
"""
SILENT_S: Final = 5.0
"""Seconds for which a worker is skipped that did not answer, or rejected for another reason. After this time, a lease,
it is known to be lost or its presence has the change.
"""


class PrefillFallback(enum.StrEnum):
    """The reason why a decode worker serves a request alone, although its fleet has or should have prefill workers."""

    NO_WORKER = "no_worker"
    """No prefill worker serves whose KV a decode worker could read."""
    UNSUITABLE = "unsuitable"
    """No prefill worker has the weights, the adapter or the context length."""
    BUSY = "busy"
    """No prefill worker had a free slot, or answered, in time."""
    SAMPLING = "sampling"
    """The sampling has state that engines cannot transfer: a seed, penalties or `extra`."""
    TOO_LARGE = "too_large"
    """The request just fits the server's `max_payload`. With one more token it might not."""
    FAILED = "failed"
    """An earlier transfer of its KV failed."""


class PrefillWorkerInfo(NamedTuple):
    """One serving prefill worker, from its presence."""

    worker: str
    num_slots: int
    """Requests that it runs at once."""
    context_len: int
    """The length of prompt and generated tokens together that it and the decode workers allow."""
    weight_version: int
    served_version: int
    """Version that answers requests without an adapter."""
    loras: frozenset[str]
    """Names of the adapters that it has."""


@dataclass(frozen=True, slots=True)
class PrefillRequirements:
    """The requirements of a request for a prefill worker."""

    affinity: str
    """Among equally good workers, all clients choose the same worker for the same value."""
    prompt_len: int
    preferred: str | None = None
    """The worker with the best prefix cache for it. If this worker has no room, all others are equally good."""
    priority: int = 0
    """Lower numbers go first."""
    min_weight_version: int = 0
    lora: str | None = None

    def is_met_by(self, worker: PrefillWorkerInfo) -> bool:
        """Return True if the worker can compute the prompt's KV and one more token."""
        version = worker.served_version if self.lora is None else worker.weight_version
        return (
            self.prompt_len + 1 < worker.context_len
            and version >= self.min_weight_version
            and (self.lora is None or self.lora in worker.loras)
        )


K = TypeVar("K", bound=Hashable)


class Decision(NamedTuple, Generic[K]):
    """The decision for a request that was in the prefill queue."""

    key: K
    worker: str | None
    """The worker for its prefill phase; None: it goes without."""
    reason: PrefillFallback | None
    """The reason to go without; None: it has a worker."""


@dataclass(slots=True)
class _WaitingPrefill:
    requirements: PrefillRequirements
    until: float


class PrefillQueue(Generic[K]):
    """The requests for one model that wait for a prefill worker or are at one."""

    def __init__(self) -> None:
        self._waiting: dict[K, _WaitingPrefill] = {}
        # By priority: the waiting requests in order of arrival.
        self._order: dict[int, dict[K, None]] = {}
        self._worker_of: dict[K, str] = {}
        self._num_prefills: dict[str, int] = {}
        # Workers to skip, each with the end of this time.
        self._passed_over: dict[str, float] = {}
        # No request must leave the prefill queue before this time.
        self._earliest = math.inf

    def __len__(self) -> int:
        """Return the number of requests in the prefill queue."""
        return len(self._waiting)

    def is_idle(self, now: float) -> bool:
        """Return True if no request waits or is at a worker, and no worker must be skipped."""
        return not (self._waiting or self._worker_of or any(until > now for until in self._passed_over.values()))

    def add(self, key: K, requirements: PrefillRequirements, *, until: float) -> None:
        """Add a request that neither waits nor is at a worker to the prefill queue, until the time `until`."""
        self._waiting[key] = _WaitingPrefill(requirements, until)
        self._order.setdefault(requirements.priority, {})[key] = None
        self._earliest = min(self._earliest, until)

    def remove(self, key: K) -> None:
        """Remove a request that no longer waits, or whose prefill phase is over; without effect on other keys."""
        self._leave(key)
        worker = self._worker_of.pop(key, None)
        if worker is not None:
            self._num_prefills[worker] -= 1
            if not self._num_prefills[worker]:
                del self._num_prefills[worker]

    def _leave(self, key: K) -> None:
        """Let a request wait no longer; without effect on one that does not wait."""
        entry = self._waiting.pop(key, None)
        if entry is not None:
            priority = entry.requirements.priority
            del self._order[priority][key]
            if not self._order[priority]:
                del self._order[priority]

    def reject(self, key: K, now: float, *, is_full: bool) -> None:
        """Record that its worker rejected the prefill phase, and remove the request.

        Args:
            is_full: True for lack of room. False: the worker did not answer, or cannot serve it.
        """
        worker = self._worker_of.get(key)
        if worker is not None:
            self._passed_over[worker] = max(self._passed_over.get(worker, now), now + (FULL_S if is_full else SILENT_S))
        self.remove(key)

    def decide(self, workers: Sequence[PrefillWorkerInfo], now: float) -> list[Decision[K]]:
        """Assign waiting requests to workers while there is room, and release requests whose time is over.

        Args:
            workers: the serving prefill workers.
        """
        self._passed_over = {worker: until for worker, until in self._passed_over.items() if until > now}
        decisions: list[Decision[K]] = []
        is_late = self._earliest <= now
        num_rooms = sum(self._room(worker) for worker in workers)
        for key in chain.from_iterable(self._order[priority] for priority in sorted(self._order)):
            if num_rooms <= 0 and workers and not is_late:
                break
            decision = self._decide(key, self._waiting[key], workers, now)
            if decision is not None:
                decisions.append(decision)
                num_rooms -= decision.worker is not None
        for decision in decisions:
            self._leave(decision.key)
        if is_late or not self._waiting:
            self._earliest = min((entry.until for entry in self._waiting.values()), default=math.inf)
        return decisions

    def _decide(
        self, key: K, entry: _WaitingPrefill, workers: Sequence[PrefillWorkerInfo], now: float
    ) -> Decision[K] | None:
        able = [candidate for candidate in workers if entry.requirements.is_met_by(candidate)]
        worker = self._choose(entry.requirements, able)
        if worker is not None:
            self._worker_of[key] = worker
            self._num_prefills[worker] = self._num_prefills.get(worker, 0) + 1
            return Decision(key, worker, None)
        if able and now < entry.until:
            return None
        reason = PrefillFallback.UNSUITABLE if workers else PrefillFallback.NO_WORKER
        return Decision(key, None, PrefillFallback.BUSY if able else reason)

    def _choose(self, requirements: PrefillRequirements, able: Sequence[PrefillWorkerInfo]) -> str | None:
        """Return the preferred worker, if it has room; else the worker with the fewest prefill phases for its size."""
        free = [worker for worker in able if self._room(worker) > 0]
        if not free:
            return None
        if any(worker.worker == requirements.preferred for worker in free):
            return requirements.preferred
        least = min(self._load(worker) for worker in free)
        free = [worker for worker in free if self._load(worker) == least]
        return rendezvous(requirements.affinity, (worker.worker for worker in free))

    def _load(self, worker: PrefillWorkerInfo) -> float:
        return self._num_prefills.get(worker.worker, 0) / worker.num_slots

    def _room(self, worker: PrefillWorkerInfo) -> int:
        if worker.worker in self._passed_over:
            return 0
        return max(worker.num_slots - self._num_prefills.get(worker.worker, 0), 0)

    def next_decision_at(self) -> float | None:
        """Return the time of the next decision if no event comes before; None: only an event matters."""
        if not self._waiting:
            return None
        return min([self._earliest, *self._passed_over.values()])
