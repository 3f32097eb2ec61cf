"""Which prefill worker each request goes to first, which wait for one, and which go without. Time is passed in.

Invariants: a request is in the line, at one worker, or neither. A client has no more legs at a worker than that has
slots. What is in the line leaves it by the time that was set for it, with a worker or without one.
"""

import enum
import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from .rendezvous import rendezvous

__all__ = ["Decision", "PrefillFallback", "PrefillQueue", "PrefillRequirements", "PrefillWorkerInfo"]

FULL_S: Final = 0.05
"""How long a worker that refused a leg for want of room is passed over: some of its steps, in which legs end."""
SILENT_S: Final = 5.0
"""How long one is passed over that did not answer, or refused for another reason: a lease, after which it is known to
be gone or announces what has changed."""


class PrefillFallback(enum.StrEnum):
    """Why a request is served by a decode worker alone, although its fleet has prefill workers or should."""

    NO_WORKER = "no_worker"
    """No prefill worker serves the model whose KV a serving decode worker could read."""
    UNSUITABLE = "unsuitable"
    """Not one of them has the weights, the adapter or the context length that it needs."""
    BUSY = "busy"
    """Not one had a free slot, or answered, in time."""
    SAMPLING = "sampling"
    """Its sampling has a state that does not go from one engine to another: a seed, penalties, `extra`."""
    TOO_LARGE = "too_large"
    """It just fits the server's `max_payload`; with one more token it might not."""
    FAILED = "failed"
    """A transfer of its KV has failed before."""


class PrefillWorkerInfo(NamedTuple):
    """One prefill worker that serves, as it announced itself."""

    worker: str
    num_slots: int
    """Requests that it runs at once."""
    context_len: int
    """Prompt and generated tokens together, of it and of those that are to go on."""
    weight_version: int
    loras: frozenset[str]
    """Names of the adapters that it has."""


@dataclass(frozen=True, slots=True)
class PrefillRequirements:
    """What a request needs of a prefill worker."""

    affinity: str
    """Of workers that are as good, all clients choose the same for equal ones."""
    prompt_len: int
    preferred: str | None = None
    """The worker whose prefix cache is best for it; where that has no room, any other is as good."""
    priority: int = 0
    """Lower goes first."""
    min_weight_version: int = 0
    lora: str | None = None

    def is_met_by(self, worker: PrefillWorkerInfo) -> bool:
        """The worker can compute the prompt's KV, and one more token would follow."""
        return (
            self.prompt_len + 1 < worker.context_len
            and worker.weight_version >= self.min_weight_version
            and (self.lora is None or self.lora in worker.loras)
        )


K = TypeVar("K", bound=Hashable)


class Decision(NamedTuple, Generic[K]):
    """What becomes of a request that was in the line."""

    key: K
    worker: str | None
    """Where its prefill leg goes; None: it goes without."""
    reason: PrefillFallback | None
    """Why."""


@dataclass(slots=True)
class _WaitingPrefill:
    requirements: PrefillRequirements
    until: float
    serial: int


class PrefillQueue(Generic[K]):
    """The requests for one model that wait for a prefill worker, and those that one has."""

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._waiting: dict[K, _WaitingPrefill] = {}
        # By priority, then in order of arrival; entries of what has left are skipped. Bounded by twice the waiting.
        self._order: list[tuple[int, int, K]] = []
        self._worker_of: dict[K, str] = {}
        self._num_prefills: dict[str, int] = {}
        # Workers to be passed over, until when.
        self._passed_over: dict[str, float] = {}
        # No request has to leave the line before.
        self._earliest = math.inf

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<PrefillQueue waiting={len(self._waiting)} prefills={len(self._worker_of)}>"

    def __len__(self) -> int:
        """Requests in the line."""
        return len(self._waiting)

    def add(self, key: K, requirements: PrefillRequirements, *, until: float) -> None:
        """Put a request that is neither waiting nor at a worker into the line, for as long as `until`."""
        entry = _WaitingPrefill(requirements, until, next(self._serials))
        self._waiting[key] = entry
        heapq.heappush(self._order, (requirements.priority, entry.serial, key))
        self._earliest = min(self._earliest, until)

    def remove(self, key: K) -> None:
        """It waits no longer, or its leg is over; without effect on what is not here."""
        self._waiting.pop(key, None)
        worker = self._worker_of.pop(key, None)
        if worker is not None:
            self._num_prefills[worker] -= 1
            if not self._num_prefills[worker]:
                del self._num_prefills[worker]
        if len(self._order) > 2 * len(self._waiting) + 16:
            self._sort()

    def _sort(self) -> None:
        self._order = [(entry.requirements.priority, entry.serial, key) for key, entry in self._waiting.items()]
        heapq.heapify(self._order)

    def reject(self, key: K, now: float, *, is_full: bool) -> None:
        """Its worker did not take the leg, which is over.

        Args:
            is_full: for want of room; else it did not answer, or cannot.
        """
        worker = self._worker_of.get(key)
        if worker is not None:
            self._passed_over[worker] = max(self._passed_over.get(worker, now), now + (FULL_S if is_full else SILENT_S))
        self.remove(key)

    def decide(self, workers: Sequence[PrefillWorkerInfo], now: float) -> list[Decision[K]]:
        """Give what waits to workers as far as there is room, and let go what has waited for long enough.

        Args:
            seats: the prefill workers that serve.
        """
        self._passed_over = {worker: until for worker, until in self._passed_over.items() if until > now}
        decisions: list[Decision[K]] = []
        kept: list[tuple[int, int, K]] = []
        is_late = self._earliest <= now
        num_rooms = sum(self._room(worker) for worker in workers)
        while self._order and (num_rooms > 0 or is_late or not workers):
            item = heapq.heappop(self._order)
            key = item[2]
            entry = self._waiting.get(key)
            if entry is None or entry.serial != item[1]:
                continue
            decision = self._decide(key, entry, workers, now)
            if decision is None:
                kept.append(item)
                continue
            decisions.append(decision)
            num_rooms -= decision.worker is not None
        for item in kept:
            heapq.heappush(self._order, item)
        if is_late or not self._waiting:
            self._earliest = min((entry.until for entry in self._waiting.values()), default=math.inf)
        return decisions

    def _decide(
        self, key: K, entry: _WaitingPrefill, workers: Sequence[PrefillWorkerInfo], now: float
    ) -> Decision[K] | None:
        able = [candidate for candidate in workers if entry.requirements.is_met_by(candidate)]
        worker = self._choose(entry.requirements, able)
        if worker is not None:
            del self._waiting[key]
            self._worker_of[key] = worker
            self._num_prefills[worker] = self._num_prefills.get(worker, 0) + 1
            return Decision(key, worker, None)
        if able and now < entry.until:
            return None
        del self._waiting[key]
        return Decision(
            key,
            None,
            PrefillFallback.BUSY if able else PrefillFallback.UNSUITABLE if workers else PrefillFallback.NO_WORKER,
        )

    def _choose(self, requirements: PrefillRequirements, able: Sequence[PrefillWorkerInfo]) -> str | None:
        """The preferred worker, if it has room; else that with the fewest legs for its size."""
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
        """When to decide again, though nothing else happens; None: what waits, if any, waits for an event."""
        if not self._waiting:
            return None
        return min([self._earliest, *self._passed_over.values()])
