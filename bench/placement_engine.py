"""A simulated worker of `bench.placement`: slots, a prefill rate, steps that grow with the batch, a bounded cache.

Times are times of the simulation. Prompts are computed one after the other, like chunked prefill with a full budget.
Decoding waits during this time. After it, each running request gets one token per step.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.placement_traces import Conversation, Tokens
from rollbus.schemas.presence import EngineStats, WorkerPresence, WorkerState

MODEL: Final = "simulated"
LEASE_S: Final = 10.0
MEMORY_S: Final = 10.0
"""Seconds over which the decode rate is averaged, as in `rollbus.workers.engines.rates`."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Parameters of an engine at full speed. The defaults are those of about an 8B model on one GPU."""

    slots: int = 16
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.01
    """Seconds of a step without requests."""
    request_step_s: float = 0.0001
    """Seconds that each running request adds to a step."""
    cache_tokens: int = 400_000
    block_tokens: int = 16


@dataclass(slots=True, eq=False)
class Job:
    """One sample of one request."""

    conversation: Conversation
    turn: int
    sample: int
    prompt: Tokens
    keys: Sequence[int]
    """Keys of the blocks of the prompt."""
    sequence: Tokens
    """The prompt and the tokens that the request will generate."""
    sequence_keys: Sequence[int]
    arrived_at: float
    is_placed: bool = False
    """True if the request came directly to its worker and not through the queue."""
    admitted_at: float = math.nan
    first_at: float = math.nan
    ended_at: float = math.nan
    cached: int = 0
    """Prompt tokens that were in the cache."""
    left_s: float = 0.0
    """Remaining seconds of the prefill."""
    worker: str | None = None
    """Name of the worker that has the request."""

    @property
    def group(self) -> str | None:
        """Name of the group of requests with this prompt."""
        conversation = self.conversation
        return conversation.group or (conversation.name if conversation.samples > 1 else None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the request generates."""
        return len(self.sequence) - len(self.prompt)


class BlockCache:
    """The blocks of sequences in an engine's cache.

    The least recently used blocks are removed first, and the last blocks of a sequence before its first blocks.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, float] = OrderedDict()

    def count(self, keys: Sequence[int]) -> int:
        """Return how many of the first blocks are in the cache."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def use(self, keys: Sequence[int], now: float) -> None:
        """Record that these blocks are used or computed now."""
        for key in reversed(keys):
            self._blocks[key] = now
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def oldest_s(self, now: float) -> float | None:
        """Return the age of the least recently used block, or None if the cache is empty."""
        return None if not self._blocks else now - next(iter(self._blocks.values()))


@dataclass(slots=True, eq=False)
class Engine:
    """One worker."""

    name: str
    shape: EngineShape
    speed: float = 1.0
    line: deque[Job] = field(default_factory=deque)
    """Requests that wait at this worker, for ways without a queue."""
    may_take_placed: bool = True
    """False if the last free slot went to a placed request while other requests were in the queue."""
    prefilled: int = 0
    """Prompt tokens that the engine computed."""
    queries: int = 0
    """Prompt tokens of all its requests."""
    _cache: BlockCache = field(init=False)
    _prefilling: deque[Job] = field(default_factory=deque)
    _running: list[tuple[float, int, Job]] = field(default_factory=list)
    _progress: float = 0.0
    _at: float = 0.0
    _serial: int = 0
    # Seconds with decoding, and the tokens of this time. Both decay exponentially.
    _decode_s: float = 0.0
    _decoded: float = 0.0

    def __post_init__(self) -> None:
        """Create the cache."""
        self._cache = BlockCache(self.shape.cache_tokens // self.shape.block_tokens)

    @property
    def free_slots(self) -> int:
        """Number of requests that the worker would start immediately."""
        return self.shape.slots - len(self._running) - len(self._prefilling)

    def start(self, job: Job, now: float) -> None:
        """Start a request. Call `advance` first. Other requests can share its blocks from now on."""
        job.worker, job.admitted_at = self.name, now
        job.cached = self._cache.count(job.keys) * self.shape.block_tokens
        self._cache.use(job.keys, now)
        computed = len(job.prompt) - job.cached
        self.prefilled += computed
        self.queries += len(job.prompt)
        job.left_s = computed / (self.shape.prefill_tokens_per_s * self.speed)
        self._prefilling.append(job)

    @property
    def _step_s(self) -> float:
        return (self.shape.step_s + self.shape.request_step_s * len(self._running)) / self.speed

    def next_at(self) -> float:
        """Return the time at which the next prefill or request ends."""
        if self._prefilling:
            return self._at + self._prefilling[0].left_s
        if self._running:
            return self._at + max(self._running[0][0] - self._progress, 0.0) * self._step_s
        return math.inf

    def advance(self, now: float) -> tuple[list[Job], list[Job]]:
        """Compute until `now`, which must not be after `next_at`.

        Returns:
            The requests that have their first token now, and the requests that have ended.
        """
        seconds, self._at = now - self._at, now
        self._measure(seconds)
        first: list[Job] = []
        if self._prefilling:
            job = self._prefilling[0]
            job.left_s -= seconds
            if job.left_s <= 1e-12:
                self._prefilling.popleft()
                self._serial += 1
                heapq.heappush(self._running, (self._progress + job.num_tokens - 1, self._serial, job))
                job.first_at = now
                first.append(job)
        elif self._running:
            self._progress += seconds / self._step_s
        ended = []
        while self._running and self._running[0][0] <= self._progress + 1e-9:
            job = heapq.heappop(self._running)[2]
            job.ended_at = now
            self._cache.use(job.sequence_keys, now)
            ended.append(job)
        return first, ended

    def _measure(self, seconds: float) -> None:
        """Update the decode rate as real workers do. While prompts are computed, only the time counts."""
        if self._running:
            kept = math.exp(-seconds / MEMORY_S)
            made = 0.0 if self._prefilling else len(self._running) * seconds / self._step_s
            self._decode_s, self._decoded = self._decode_s * kept + seconds, self._decoded * kept + made

    def presence(self, now: float) -> WorkerPresence:
        """Return the presence of the worker."""
        running = len(self._running)
        return WorkerPresence(
            worker=self.name,
            incarnation="1",
            model=MODEL,
            state=WorkerState.SERVING,
            weight_version=0,
            in_flight=running + len(self._prefilling),
            free_slots=max(self.free_slots - len(self.line), 0),
            uptime_s=now,
            lease_s=LEASE_S,
            queued=len(self.line),
            engine_stats=EngineStats(
                running=running,
                waiting=len(self._prefilling),
                prefill_tokens_per_s=self.shape.prefill_tokens_per_s * self.speed if self.queries else None,
                decode_tokens_per_s=self._decoded / self._decode_s if self._decoded else None,
            ),
            oldest_prefix_s=self._cache.oldest_s(now),
        )
