"""What is known of each worker's load: its last announcement, and what this client has sent and seen since then."""

import statistics
from dataclasses import dataclass, field
from typing import Final

from ....schemas.presence import EngineStats, WorkerPresence
from ..fleet.presence_table import MAX_WORKERS

__all__ = ["LoadTable", "WorkerLoad"]

SILENT_S: Final = 10.0
"""How long nothing is placed at a worker that let a direct request wait in vain."""
DEFAULT_PREFILL_RATE: Final = 8_000.0
"""Prompt tokens a second of a worker that has announced no rate yet."""
RATE_KEPT: Final = 0.995
"""What one announcement leaves of the best prefill rate: an engine that finds most of each prompt cached seems slow."""
MEAN_OVER: Final = 10
"""Announcements after which the mean of running requests has followed: as many seconds as the rates remember."""
RUNNING_SLOWDOWN: Final = 0.01
"""How much longer an engine step takes for each running request, as a share of a step with none."""
SLOW: Final = 1.5
"""A worker that takes less than this times what the typical worker takes counts as equal: rates are noisy."""
SLOWEST: Final = 16.0
"""No worker counts as slower than this times the typical one, whatever it announces."""
TYPICAL_S: Final = 1.0
"""How long the typical rates are used before they are computed again from all workers."""


@dataclass(slots=True)
class WorkerLoad:
    """The load of one worker. Read it; only `LoadTable` changes it."""

    worker: str
    incarnation: str
    free_slots: int = 0
    """Requests that it would start at once: as announced, less what was sent there since."""
    running: int = 0
    """Requests that it has: as announced, and what was sent there since."""
    weight_version: int = 0
    loras: dict[str, int] = field(default_factory=dict)
    """Version of each adapter that it has, by name."""
    slowness: float = 1.0
    """How many times longer than the typical worker it takes for the same work; 1: not noticeably."""
    prefill_rate: float = DEFAULT_PREFILL_RATE
    """Prompt tokens that it computes a second."""
    silent_until: float = 0.0
    """Nothing is placed there before."""
    _token_s: float | None = None
    _mean_running: float = 0.0
    _backlog: float = 0.0
    _backlog_at: float = 0.0

    def room(self, now: float) -> int:
        """Return how many more requests may be placed there now."""
        return 0 if now < self.silent_until else max(self.free_slots, 0)

    def backlog(self, now: float) -> float:
        """Return how many prompt tokens that this client sent there it has not computed yet, by its rate."""
        return max(self._backlog - self.prefill_rate * (now - self._backlog_at), 0.0)

    def add_backlog(self, tokens: int, now: float) -> None:
        """Count prompt tokens that it has to compute."""
        self._backlog, self._backlog_at = self.backlog(now) + tokens, now

    def update_rates(self, stats: EngineStats | None, now: float) -> None:
        """Handle the announced rates; those that are not announced stay."""
        if stats is None:
            return
        if stats.prefill_tokens_per_s:
            self.add_backlog(0, now)
            is_first = self.prefill_rate == DEFAULT_PREFILL_RATE
            kept = 0.0 if is_first else self.prefill_rate * RATE_KEPT
            self.prefill_rate = max(stats.prefill_tokens_per_s, kept)
        if stats.decode_tokens_per_s and stats.running:
            if not self._mean_running:
                self._mean_running = stats.running
            self._mean_running += (stats.running - self._mean_running) / MEAN_OVER
            slowdown = 1 + RUNNING_SLOWDOWN * self._mean_running
            self._token_s = self._mean_running / stats.decode_tokens_per_s / slowdown

    @property
    def token_s(self) -> float | None:
        """Seconds in which it would make a token of a request that runs alone; None: not known."""
        return self._token_s


class LoadTable:
    """The load of each worker of one model."""

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._typical_prefill_rate = DEFAULT_PREFILL_RATE
        self._typical_token_s: float | None = None
        self._typical_at = -TYPICAL_S

    def __len__(self) -> int:
        """Number of workers."""
        return len(self._loads)

    def get(self, worker: str) -> WorkerLoad | None:
        """Return the load of a worker; None if it is not known."""
        return self._loads.get(worker)

    def update(self, presence: WorkerPresence, now: float) -> None:
        """Handle an announcement: it says how many slots are free, whatever was counted since the one before."""
        load = self._loads.get(presence.worker)
        if load is None or load.incarnation != presence.incarnation:
            if load is None and len(self._loads) >= MAX_WORKERS:
                return
            silent_until = 0.0 if load is None else load.silent_until
            load = WorkerLoad(presence.worker, presence.incarnation, silent_until=silent_until)
            self._loads[presence.worker] = load
        load.free_slots, load.running = presence.free_slots, presence.in_flight
        load.weight_version = presence.weight_version
        load.loras = {lora.name: lora.version for lora in presence.loras}
        load.update_rates(presence.engine_stats, now)
        self._update_typical(now)
        load.slowness = self._slowness(load)

    def _update_typical(self, now: float) -> None:
        if now - self._typical_at < TYPICAL_S:
            return
        self._typical_at = now
        self._typical_prefill_rate = statistics.median(load.prefill_rate for load in self._loads.values())
        known = [load.token_s for load in self._loads.values() if load.token_s is not None]
        self._typical_token_s = statistics.median(known) if known else None

    def _slowness(self, load: WorkerLoad) -> float:
        slowness = self._typical_prefill_rate / load.prefill_rate
        if load.token_s is not None and self._typical_token_s is not None:
            slowness = max(slowness, load.token_s / self._typical_token_s)
        return 1.0 if slowness < SLOW else min(slowness, SLOWEST)

    def remove(self, worker: str) -> None:
        """The worker is gone."""
        self._loads.pop(worker, None)

    def free_slots(self, worker: str, now: float) -> int:
        """Return how many more requests may be placed at a worker; 0 if it is not known."""
        load = self._loads.get(worker)
        return 0 if load is None else load.room(now)

    def placed(self, worker: str, prompt_tokens: int, now: float) -> None:
        """Count a request that a worker gets: it was sent there, or the worker has admitted it from the queue.

        Args:
            prompt_tokens: those that it has to compute, as far as is known.
        """
        load = self._loads.get(worker)
        if load is not None:
            load.free_slots -= 1
            load.running += 1
            load.add_backlog(prompt_tokens, now)

    def ended(self, worker: str) -> None:
        """Count a request of this client that a worker had, and has no more: there is a free slot."""
        load = self._loads.get(worker)
        if load is not None:
            load.running = max(load.running - 1, 0)
            load.free_slots += 1

    def refused(self, worker: str, now: float) -> None:
        """A worker has refused what was placed there: it has no room before it announces some again."""
        load = self._loads.get(worker)
        if load is not None:
            load.free_slots = 0
            load.add_backlog(0, now)

    def silent(self, worker: str, now: float) -> None:
        """A worker has not answered to what was placed there: it gets nothing for ten seconds."""
        load = self._loads.get(worker)
        if load is not None:
            load.silent_until = now + SILENT_S
