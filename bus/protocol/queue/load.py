"""What a client knows of each worker's load: the prompts in its prefix cache, and the work that it has.

The presence table limits the number of workers.
"""

import math
import statistics
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.presence import EngineStats, WorkerPresence

PIECE_TOKENS: Final = 256
"""Tokens of a piece. Engines cache blocks of 16 to 128 tokens, but pieces of 16 take six times as long to hash."""
PIECE_BYTES: Final = PIECE_TOKENS * 4
MAX_PIECES: Final = 131_072
"""Pieces that are remembered: prompts of 33 million tokens, more than the caches of many fleets. About 60 MB."""
MAX_HOLDERS: Final = 4 * MAX_PIECES
"""Pairs of piece and worker that are remembered: many workers hold the pieces that many prompts share."""
MAX_AGE_S: Final = 3_600.0
"""Seconds for which a piece counts as cached if its worker does not report evictions. A busy engine evicts it earlier.
"""
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


class PrefixScope(NamedTuple):
    """The attributes besides the tokens that separate entries of a prefix cache."""

    lora: str | None = None
    """Name of the adapter; None: the base model."""
    lora_version: int = 0
    """The version of the adapter."""
    cache_salt: str | None = None
    """The cache salt of the request."""


class CacheId(NamedTuple):
    """One prefix cache, from its creation or reset to the next reset."""

    worker: str
    incarnation: str
    cache_epoch: int


def piece_hashes(token_ids: npt.NDArray[np.int32], scope: PrefixScope) -> tuple[int, ...]:
    """Return the hash of each whole piece of a prompt. A hash covers the scope and all tokens up to the piece's end."""
    data = np.asarray(token_ids, np.int32).tobytes()
    chained = hash(scope)
    pieces = []
    for start in range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES):
        chained = hash((chained, data[start : start + PIECE_BYTES]))
        pieces.append(chained)
    return tuple(pieces)


def hint_hash(kind: str, name: str, scope: PrefixScope) -> int:
    """Return the piece that represents a session or a group. A worker that serves it holds that piece."""
    return hash((scope, kind, name))


@dataclass(slots=True)
class _Cache:
    """The present cache of a worker."""

    id: CacheId
    since: float
    """The earliest time of use of an entry that the cache still holds."""


class PrefixIndex:
    """The pieces that each worker's cache should hold. Above the limits, the least recently used pieces are removed.

    The index cuts prompts into pieces of 256 tokens, as far as this client knows them from its own requests. The hash
    of a piece covers all pieces before it. The hashes are Python's own: they are valid only in this process, and a
    collision only makes a placement worse.

    Invariant: a worker that holds a piece has used each earlier piece of that prompt at the same time or later. So the
    deepest piece that a worker holds shows how much of the prompt its cache has.

    Args:
        max_pieces: the maximum number of pieces.
        max_holders: the maximum number of pairs of piece and worker.
    """

    def __init__(self, max_pieces: int = MAX_PIECES, max_holders: int = MAX_HOLDERS) -> None:
        self._max_pieces = max_pieces
        self._max_holders = max_holders
        # By piece, least recently used first: the workers that hold it, with the time of its last use.
        self._pieces: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._num_holders = 0
        self._caches: dict[str, _Cache] = {}

    def __len__(self) -> int:
        """Return the number of pieces that are remembered."""
        return len(self._pieces)

    def cache_of(self, worker: str) -> CacheId | None:
        """Return the present cache of a worker; None if the worker is not known."""
        cache = self._caches.get(worker)
        return None if cache is None else cache.id

    def update(self, cache_id: CacheId, oldest_prefix_s: float | None, now: float) -> None:
        """Handle presence. A new cache is empty, and a cache holds nothing that was used before its oldest prefix.

        Args:
            oldest_prefix_s: age of the oldest prefix that the cache still holds; None: not known.
        """
        cache = self._caches.get(cache_id.worker)
        if cache is None or cache.id != cache_id:
            cache = self._caches[cache_id.worker] = _Cache(cache_id, now)
        if oldest_prefix_s is not None:
            cache.since = max(cache.since, now - oldest_prefix_s)

    def remove(self, worker: str) -> None:
        """Remove the cache of a lost worker."""
        self._caches.pop(worker, None)

    def record(self, cache_id: CacheId, pieces: Sequence[int], now: float) -> None:
        """Record that a worker uses a prompt now; without effect if the worker has another cache meanwhile."""
        worker = cache_id.worker
        if self.cache_of(worker) != cache_id:
            return
        # The deepest piece first: at the limit, the end of a prompt is removed before its beginning.
        for piece in reversed(pieces):
            holders = self._pieces.setdefault(piece, {})
            self._pieces.move_to_end(piece)
            self._num_holders += worker not in holders
            holders[worker] = now
        while len(self._pieces) > self._max_pieces or self._num_holders > self._max_holders:
            self._num_holders -= len(self._pieces.popitem(last=False)[1])

    def discard(self, worker: str, piece: int) -> None:
        """Remove one piece of a worker."""
        holders = self._pieces.get(piece, {})
        if holders.pop(worker, None) is not None:
            self._num_holders -= 1
            if not holders:
                del self._pieces[piece]

    def longest(self, pieces: Sequence[int], now: float) -> dict[str, int]:
        """Return how many tokens of a prompt each worker's cache should hold, without workers that hold none."""
        held = []
        for piece in pieces:
            holders = self._pieces.get(piece)
            if holders is None:
                break
            held.append(holders)
        found: dict[str, int] = {}
        for depth in range(len(held), 0, -1):
            holders = held[depth - 1]
            # The workers that hold deeper pieces hold this one too. Mostly there are no others.
            if len(holders) == len(found):
                continue
            for worker in holders.keys() - found.keys():
                if self._has(worker, holders[worker], now):
                    found[worker] = depth * PIECE_TOKENS
                else:
                    self.discard(worker, pieces[depth - 1])
        return found

    def last_holder(self, piece: int, now: float) -> str | None:
        """Return the worker that used a piece last, of those that should still hold it; None: no worker holds it."""
        holders = self._pieces.get(piece, {})
        valid = [worker for worker, used_at in holders.items() if self._has(worker, used_at, now)]
        # At equal times, the worker that was recorded last.
        return max(reversed(valid), key=holders.__getitem__, default=None)

    def _has(self, worker: str, used_at: float, now: float) -> bool:
        """Return True if the cache of a worker should still have an entry."""
        cache = self._caches.get(worker)
        return cache is not None and cache.since <= used_at >= now - MAX_AGE_S


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

    def may_queue(self, now: float) -> bool:
        """Return True if a request may wait there: above its free slots, it got fewer than its slots since presence."""
        return now >= self.closed_until and self.free_slots > -self.slots

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
            self.prefill_rate = max(_clamp_rate(stats.prefill_tokens_per_s), RATE_KEPT * (self.prefill_rate or 0.0))
        if stats.decode_tokens_per_s and stats.running:
            running = min(stats.running, MAX_RATE)
            self._mean_running += (running - self._mean_running) / (MEAN_OVER if self._mean_running else 1)
            slowdown = 1 + RUNNING_SLOWDOWN * self._mean_running
            self.token_s = self._mean_running / _clamp_rate(stats.decode_tokens_per_s) / slowdown


def _clamp_rate(rate: float) -> float:
    return min(max(rate, MIN_RATE), MAX_RATE)


class LoadTable:
    """The loads of the workers of one model.

    A load is the worker's last presence, and the requests that this client has counted since then.
    """

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._typical_prefill_rate: float | None = None
        self._typical_token_s: float | None = None
        self._typical_until = 0.0

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self._loads)

    def get(self, worker: str) -> WorkerLoad | None:
        """Return the load of a worker; None if the worker is not known."""
        return self._loads.get(worker)

    def update(self, presence: WorkerPresence, now: float) -> None:
        """Handle presence. Its counts replace the counts since the previous presence."""
        load = self._loads.get(presence.worker)
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
            self._typical_prefill_rate = _find_median([load.prefill_rate for load in self._loads.values()])
            self._typical_token_s = _find_median([load.token_s for load in self._loads.values()])
        load.slowness = self._compare_speed(load)
        load.assume_rate(self._typical_prefill_rate, now)

    def _compare_speed(self, load: WorkerLoad) -> float:
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

    def _find(self, worker: str) -> WorkerLoad:
        """Return the load of a worker. What is counted for a worker that is not known has no effect."""
        return self._loads.get(worker) or WorkerLoad(worker, "")

    def free_slots(self, worker: str, now: float) -> int:
        """Return how many more requests may be placed at a worker; 0 if the worker is not known."""
        return self._find(worker).room(now)

    def placed(self, worker: str, prompt_tokens: int, now: float) -> None:
        """Count a request that was sent to a worker directly, or that a worker has admitted from the queue.

        Args:
            prompt_tokens: those that the worker must compute, as far as is known.
        """
        load = self._find(worker)
        load.free_slots -= 1
        load.running += 1
        load.add_backlog(prompt_tokens, now)

    def ended(self, worker: str) -> None:
        """Count a request that has ended at a worker."""
        load = self._find(worker)
        # Presence may have arrived before the end that it includes.
        load.free_slots = min(load.free_slots + 1, load.slots)
        load.running = max(load.running - 1, 0)

    def admitted(self, worker: str) -> None:
        """Count a placed request that its worker has admitted."""
        self._find(worker).refusals = 0

    def refused(self, worker: str, now: float) -> None:
        """Count a rejected request. The worker has no room for a while, and until its presence has free slots."""
        load = self._find(worker)
        load.free_slots = min(load.free_slots, 0)
        load.running = max(load.running - 1, 0)
        # Requests that were in flight together are rejected together, which counts once.
        if now >= load.closed_until:
            load.closed_until = now + min(FULL_S * 2**load.refusals, SILENT_S)
            load.refusals = min(load.refusals + 1, MAX_REFUSALS)

    def silent(self, worker: str, now: float) -> None:
        """Count a request that a worker did not answer in time. It gets no placed requests for `SILENT_S`."""
        load = self._find(worker)
        load.closed_until = now + SILENT_S
        load.running = max(load.running - 1, 0)


def _find_median(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None
