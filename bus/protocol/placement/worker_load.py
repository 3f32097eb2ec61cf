"""The known load of each worker: its last presence, and the requests that this client has counted since then."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ....schemas.presence import EngineStats, WorkerPresence
from ..fleet.presence_table import MAX_WORKERS

__all__ = ["SILENT_S", "LoadTable", "WorkerLoad"]

SILENT_S: Final = 10.0
"""Seconds for which a worker gets no placed requests after it did not answer a direct request in time."""
FULL_S: Final = 0.05
"""Seconds for which a worker gets no placed requests after a rejection: presence may have crossed its answer. The time
doubles at each further rejection, up to `SILENT_S`, until the worker admits a placed request.
"""
MAX_REFUSALS: Final = 8
"""Rejections that are counted: by then a worker is closed for `SILENT_S`."""
FULL_KV: Final = 0.95
"""Share of a KV cache in use at which a worker counts as full: another request may preempt a running one."""
DEFAULT_PREFILL_RATE: Final = 8_000.0
"""Prompt tokens per second of a worker without a published rate, while no other worker has published one."""
MIN_RATE: Final = 1.0
MAX_RATE: Final = 1e9
"""Published rates, in tokens per second, are clamped to these limits, so that no quotient overflows."""
MAX_REQUESTS: Final = 1_000_000
"""Published numbers of requests are clamped to this limit, which no worker reaches."""
RATE_KEPT: Final = 0.995
"""The share of a worker's highest prefill rate that remains after each presence message: half after two minutes. An
engine publishes a low rate while it computes only the short ends of cached prompts.
"""
MEAN_OVER: Final = 10
"""Presence messages in the mean of running requests: as many seconds as the published decode rate covers."""
RUNNING_SLOWDOWN: Final = 0.01
"""Time that each running request adds to an engine step, as a share of a step without any."""
SLOW: Final = 1.5
"""A worker counts as slow if it takes at least this many times as long as the typical worker. Smaller differences do
not count, because rates are noisy.
"""
SLOWEST: Final = 16.0
"""A worker counts as at most this many times slower than the typical worker, regardless of its published rates."""
TYPICAL_S: Final = 1.0
"""Seconds until the typical rates are computed again from the rates of all workers."""


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """The load of one worker, read-only. Only its `LoadTable` changes it."""

    worker: str
    incarnation: str
    free_slots: int = 0
    """Requests that it would start immediately: the published number minus those that it received since."""
    slots: int = 0
    """Requests that it can run, as published: running requests and free slots."""
    running: int = 0
    """Requests that it has: the published number plus those that it received since."""
    weight_version: int = 0
    served_version: int = 0
    """As in presence: the version that answers requests without an adapter."""
    loras: Mapping[str, int] = field(default_factory=dict)
    """Versions of its adapters, by name."""
    slowness: float = 1.0
    """The time that it needs for the same work, in multiples of the typical worker's time; 1: about as long, or less.
    """
    prefill_rate: float | None = None
    """Prompt tokens that it computes per second; None: not published yet."""
    assumed_rate: float = DEFAULT_PREFILL_RATE
    """The value of `prefill_rate`; while that is not known, the median of the other workers."""
    token_s: float | None = None
    """Seconds for one token of a request that runs alone, computed from published rates; None: not known yet."""
    closed_until: float = 0.0
    """The time until which it gets no placed requests."""
    refusals: int = 0
    """The number of times that it was closed since it last admitted a placed request."""
    computing_until: float = -math.inf
    """The time at which it has computed all prompts of this client, by its rate."""
    _mean_running: float = 0.0

    def has(self, version: int, lora: str | None) -> bool:
        """Return True if the worker has at least this version, and the adapter."""
        if lora is None:
            return self.served_version >= version
        return self.weight_version >= version and lora in self.loras

    def room(self, now: float) -> int:
        """Return how many more requests may be placed there."""
        return 0 if now < self.closed_until else max(self.free_slots, 0)

    def backlog(self, now: float) -> float:
        """Return how many prompt tokens of this client's requests it must still compute, estimated by its rate."""
        return max(self.computing_until - now, 0.0) * self.assumed_rate

    def add_backlog(self, tokens: int, now: float) -> None:
        """Count prompt tokens that it must compute."""
        self.computing_until = max(self.computing_until, now) + tokens / self.assumed_rate

    def assume_rate(self, typical: float | None, now: float) -> None:
        """Use its own prefill rate from now on, or that of the typical worker, if one is known."""
        rate = self.prefill_rate or typical or DEFAULT_PREFILL_RATE
        if rate != self.assumed_rate:
            backlog = self.backlog(now)
            self.assumed_rate, self.computing_until = rate, now + backlog / rate

    def update_rates(self, stats: EngineStats) -> None:
        """Handle published rates. A rate that is not published stays unchanged."""
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
        """Return the number of workers."""
        return len(self._loads)

    def __repr__(self) -> str:
        """Return one line with the free slots of each worker."""
        return f"<LoadTable {' '.join(f'{load.worker}:{load.free_slots}' for load in self._loads.values()) or 'empty'}>"

    def get(self, worker: str) -> WorkerLoad | None:
        """Return the load of a worker; None if the worker is not known."""
        return self._loads.get(worker)

    def update(self, presence: WorkerPresence, now: float) -> None:
        """Handle presence. Its counts replace the counts since the previous presence."""
        load = self._loads.get(presence.worker)
        if load is None and len(self._loads) >= MAX_WORKERS:
            return
        if load is None or load.incarnation != presence.incarnation:
            # A new incarnation counts as no better than the previous one until it has admitted a request.
            closed_until, refusals = (0.0, 0) if load is None else (load.closed_until, load.refusals)
            load = WorkerLoad(presence.worker, presence.incarnation, closed_until=closed_until, refusals=refusals)
            self._loads[presence.worker] = load
        load.free_slots = min(presence.free_slots, MAX_REQUESTS)
        load.running = min(presence.in_flight, MAX_REQUESTS)
        load.slots = load.free_slots + load.running
        load.weight_version, load.served_version = presence.weight_version, presence.served_version
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
        # A slow worker is slow at both. A worker that computes more prompts generates fewer tokens meanwhile. A worker
        # that computes only the short ends of cached prompts seems slow at prompts.
        known = []
        if load.prefill_rate is not None and self._typical_prefill_rate is not None:
            known.append(self._typical_prefill_rate / load.prefill_rate)
        if load.token_s is not None and self._typical_token_s is not None:
            known.append(load.token_s / self._typical_token_s)
        slowness = min(known, default=1.0)
        return 1.0 if slowness < SLOW else min(slowness, SLOWEST)

    def remove(self, worker: str) -> None:
        """Remove a lost worker."""
        self._loads.pop(worker, None)

    def free_slots(self, worker: str, now: float) -> int:
        """Return how many more requests may be placed at a worker; 0 if the worker is not known."""
        load = self._loads.get(worker)
        return 0 if load is None else load.room(now)

    def placed(self, worker: str, prompt_tokens: int, now: float) -> None:
        """Count a request that was sent to a worker directly, or that a worker has admitted from the queue.

        Args:
            prompt_tokens: those that the worker must compute, as far as is known.
        """
        load = self._loads.get(worker)
        if load is not None:
            load.free_slots -= 1
            load.running += 1
            load.add_backlog(prompt_tokens, now)

    def ended(self, worker: str) -> None:
        """Count a request that has ended at a worker."""
        load = self._loads.get(worker)
        if load is not None:
            # Presence may have arrived before the end that it includes.
            load.free_slots = min(load.free_slots + 1, load.slots)
            load.running = max(load.running - 1, 0)

    def admitted(self, worker: str) -> None:
        """Count a placed request that its worker has admitted."""
        load = self._loads.get(worker)
        if load is not None:
            load.refusals = 0

    def refused(self, worker: str, now: float) -> None:
        """Count a rejected request. The worker has no room for a while, and until its presence has free slots."""
        load = self._loads.get(worker)
        if load is None:
            return
        load.free_slots = min(load.free_slots, 0)
        load.running = max(load.running - 1, 0)
        # Requests that were in flight together are rejected together, which counts once.
        if now >= load.closed_until:
            load.closed_until = now + min(FULL_S * 2**load.refusals, SILENT_S)
            load.refusals = min(load.refusals + 1, MAX_REFUSALS)

    def silent(self, worker: str, now: float) -> None:
        """Count a request that a worker did not answer in time. It gets no placed requests for `SILENT_S`."""
        load = self._loads.get(worker)
        if load is not None:
            load.closed_until = now + SILENT_S
            load.running = max(load.running - 1, 0)


def _median(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None
