"""What is known of each worker's load: its last announcement, and what this client has counted since then."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ....schemas.presence import EngineStats, WorkerPresence
from ..fleet.presence_table import MAX_WORKERS

__all__ = ["SILENT_S", "LoadTable", "WorkerLoad"]

SILENT_S: Final = 10.0
"""How long nothing is placed at a worker that did not answer a direct request in time."""
FULL_S: Final = 0.05
"""How long nothing is placed at a worker that refused a request: an announcement may have crossed its answer. Twice as
long each time that it refuses again, up to `SILENT_S`, until it admits what is placed there."""
MAX_REFUSALS: Final = 8
"""Refusals that are counted: by then a worker is closed for `SILENT_S`."""
FULL_KV: Final = 0.95
"""Share of a KV cache in use from which a worker counts as full: another request may take that of a running one."""
DEFAULT_PREFILL_RATE: Final = 8_000.0
"""Prompt tokens a second of a worker that has announced no rate yet, while no other worker has."""
MIN_RATE: Final = 1.0
MAX_RATE: Final = 1e9
"""Announced rates, in tokens a second, count as at least and at most this: no quotient of them overflows."""
MAX_REQUESTS: Final = 1_000_000
"""Announced numbers of requests count as at most this: no worker has so many, and any number may be announced."""
RATE_KEPT: Final = 0.995
"""Each announcement of a worker leaves this share of its highest prefill rate, half after two minutes: an engine
announces a low rate while it computes only the short ends of cached prompts."""
MEAN_OVER: Final = 10
"""Announcements that the mean of running requests covers: as many seconds as the announced decode rate."""
RUNNING_SLOWDOWN: Final = 0.01
"""Time that each running request adds to an engine step, as a share of a step without any."""
SLOW: Final = 1.5
"""A worker counts as slow if it takes at least this many times as long as the typical worker. Smaller differences do
not count, as rates are noisy."""
SLOWEST: Final = 16.0
"""A worker counts as at most this many times slower than the typical worker, whatever rates it announces."""
TYPICAL_S: Final = 1.0
"""Seconds until the typical rates are computed again from the rates of all workers."""


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """The load of one worker, for reading; only its `LoadTable` changes it."""

    worker: str
    incarnation: str
    free_slots: int = 0
    """Requests that it would start at once: as announced, less those that it got since."""
    slots: int = 0
    """Requests that it can run, as announced: those that it has, and its free slots."""
    running: int = 0
    """Requests that it has: as announced, and those that it got since."""
    weight_version: int = 0
    loras: Mapping[str, int] = field(default_factory=dict)
    """Versions of its adapters, by name."""
    slowness: float = 1.0
    """How many times as long as the typical worker it takes for the same work; 1: about as long, or less."""
    prefill_rate: float | None = None
    """Prompt tokens that it computes a second; None: not announced yet."""
    assumed_rate: float = DEFAULT_PREFILL_RATE
    """As `prefill_rate`; while that is not known, the median of the other workers."""
    token_s: float | None = None
    """Seconds for one token of a request that runs alone, computed from announced rates; None: not known yet."""
    closed_until: float = 0.0
    """Until then nothing is placed there."""
    refusals: int = 0
    """Times that it was closed since it last admitted what was placed there."""
    computing_until: float = -math.inf
    """By its rate, it has computed all prompts of this client then."""
    _mean_running: float = 0.0

    def room(self, now: float) -> int:
        """Return how many more requests may be placed there."""
        return 0 if now < self.closed_until else max(self.free_slots, 0)

    def backlog(self, now: float) -> float:
        """Return how many prompt tokens of this client's requests it has yet to compute, estimated by its rate."""
        return max(self.computing_until - now, 0.0) * self.assumed_rate

    def add_backlog(self, tokens: int, now: float) -> None:
        """Count prompt tokens that it has to compute."""
        self.computing_until = max(self.computing_until, now) + tokens / self.assumed_rate

    def assume_rate(self, typical: float | None, now: float) -> None:
        """Count with its own prefill rate from now on, or with that of the typical worker, if one is known."""
        rate = self.prefill_rate or typical or DEFAULT_PREFILL_RATE
        if rate != self.assumed_rate:
            backlog = self.backlog(now)
            self.assumed_rate, self.computing_until = rate, now + backlog / rate

    def update_rates(self, stats: EngineStats) -> None:
        """Handle announced rates; a rate that is not announced stays as it was."""
        if stats.prefill_tokens_per_s:
            self.prefill_rate = max(_limit(stats.prefill_tokens_per_s), RATE_KEPT * (self.prefill_rate or 0.0))
        if stats.decode_tokens_per_s and stats.running:
            running = min(stats.running, MAX_RATE)
            self._mean_running += (running - self._mean_running) / (MEAN_OVER if self._mean_running else 1)
            slowdown = 1 + RUNNING_SLOWDOWN * self._mean_running
            self.token_s = self._mean_running / _limit(stats.decode_tokens_per_s) / slowdown


def _limit(rate: float) -> float:
    return min(max(rate, MIN_RATE), MAX_RATE)


class LoadTable:
    """The loads of the workers of one model."""

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._typical_prefill_rate: float | None = None
        self._typical_token_s: float | None = None
        self._typical_until = 0.0

    def __len__(self) -> int:
        """Number of workers."""
        return len(self._loads)

    def __repr__(self) -> str:
        """One line with the free slots of each worker."""
        return f"<LoadTable {' '.join(f'{load.worker}:{load.free_slots}' for load in self._loads.values()) or 'empty'}>"

    def get(self, worker: str) -> WorkerLoad | None:
        """Return the load of a worker; None if the worker is not known."""
        return self._loads.get(worker)

    def update(self, presence: WorkerPresence, now: float) -> None:
        """Handle an announcement: its counts replace what was counted since the one before."""
        load = self._loads.get(presence.worker)
        if load is None and len(self._loads) >= MAX_WORKERS:
            return
        if load is None or load.incarnation != presence.incarnation:
            # A new incarnation is no better than the one before until it has admitted a request.
            closed_until, refusals = (0.0, 0) if load is None else (load.closed_until, load.refusals)
            load = WorkerLoad(presence.worker, presence.incarnation, closed_until=closed_until, refusals=refusals)
            self._loads[presence.worker] = load
        load.free_slots = min(presence.free_slots, MAX_REQUESTS)
        load.running = min(presence.in_flight, MAX_REQUESTS)
        load.slots = load.free_slots + load.running
        load.weight_version = presence.weight_version
        load.loras = {lora.name: lora.version for lora in presence.loras}
        if presence.engine_stats is not None:
            load.update_rates(presence.engine_stats)
            if (presence.engine_stats.kv_cache_use or 0) >= FULL_KV:
                load.free_slots = 0
        if now >= self._typical_until:
            self._typical_until = now + TYPICAL_S
            self._typical_prefill_rate = _median([load.prefill_rate for load in self._loads.values()])
            self._typical_token_s = _median([load.token_s for load in self._loads.values()])
        load.slowness = self._slowness(load)
        load.assume_rate(self._typical_prefill_rate, now)

    def _slowness(self, load: WorkerLoad) -> float:
        # A slow worker is slow at both. A worker that computes more prompts makes fewer tokens meanwhile, and one that
        # computes only the short ends of cached prompts seems slow at prompts.
        known = []
        if load.prefill_rate is not None and self._typical_prefill_rate is not None:
            known.append(self._typical_prefill_rate / load.prefill_rate)
        if load.token_s is not None and self._typical_token_s is not None:
            known.append(load.token_s / self._typical_token_s)
        slowness = min(known, default=1.0)
        return 1.0 if slowness < SLOW else min(slowness, SLOWEST)

    def remove(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._loads.pop(worker, None)

    def free_slots(self, worker: str, now: float) -> int:
        """Return how many more requests may be placed at a worker; 0 if the worker is not known."""
        load = self._loads.get(worker)
        return 0 if load is None else load.room(now)

    def placed(self, worker: str, prompt_tokens: int, now: float) -> None:
        """Count a request that was sent to a worker directly, or that a worker has admitted from the queue.

        Args:
            prompt_tokens: those that the worker has to compute, as far as is known.
        """
        load = self._loads.get(worker)
        if load is not None:
            load.free_slots -= 1
            load.running += 1
            load.add_backlog(prompt_tokens, now)

    def ended(self, worker: str) -> None:
        """Count a request that a worker had and has no more."""
        load = self._loads.get(worker)
        if load is not None:
            # An announcement may have come before the end that it counts.
            load.free_slots = min(load.free_slots + 1, load.slots)
            load.running = max(load.running - 1, 0)

    def admitted(self, worker: str) -> None:
        """Count a request that was placed at a worker, and that the worker has admitted."""
        load = self._loads.get(worker)
        if load is not None:
            load.refusals = 0

    def refused(self, worker: str, now: float) -> None:
        """Count a request that a worker has refused: it has no room until it announces some, and for a while."""
        load = self._loads.get(worker)
        if load is None:
            return
        load.free_slots = min(load.free_slots, 0)
        load.running = max(load.running - 1, 0)
        # Requests that were on their way together are refused together, which counts once.
        if now >= load.closed_until:
            load.closed_until = now + min(FULL_S * 2**load.refusals, SILENT_S)
            load.refusals = min(load.refusals + 1, MAX_REFUSALS)

    def silent(self, worker: str, now: float) -> None:
        """Count a request that a worker has not answered in time: nothing is placed there for `SILENT_S`."""
        load = self._loads.get(worker)
        if load is not None:
            load.closed_until = now + SILENT_S
            load.running = max(load.running - 1, 0)


def _median(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None
