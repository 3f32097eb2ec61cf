"""A simulated worker of `bench.placement`: slots, a prefill rate, steps that grow with the batch, a bounded cache.

Times are of the simulation. Prompts are computed one after another, as chunked prefill does when its budget is full.
Decoding waits meanwhile, and then each running request gets a token a step.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.placement_traces import Conversation, Tokens
from rollbus.schemas.presence import EngineStats, WorkerPresence, WorkerState

__all__ = ["MODEL", "BlockCache", "Engine", "EngineShape", "Job"]

MODEL: Final = "simulated"
LEASE_S: Final = 10.0
MEMORY_S: Final = 10.0
"""Of the rate of decoding, as in `rollbus.workers.engines.token_rates`."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Of an engine at full speed: about an 8B model on one GPU."""

    slots: int = 16
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.01
    """Of a step with nothing in it."""
    request_step_s: float = 0.0001
    """What each running request adds to it."""
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
    """Of the blocks of its prompt."""
    sequence: Tokens
    """Prompt and the tokens that it will generate."""
    sequence_keys: Sequence[int]
    arrived_at: float
    is_placed: bool = False
    """It came to its worker past the queue."""
    admitted_at: float = math.nan
    first_at: float = math.nan
    ended_at: float = math.nan
    cached: int = 0
    """Prompt tokens that were found in the cache."""
    left_s: float = 0.0
    """Of its prefill."""
    worker: str | None = None
    """Which has it."""

    @property
    def group(self) -> str | None:
        """Name of those that share its prompt."""
        conversation = self.conversation
        return conversation.group or (conversation.name if conversation.samples > 1 else None)

    @property
    def num_tokens(self) -> int:
        """Tokens that it generates."""
        return len(self.sequence) - len(self.prompt)


class BlockCache:
    """Blocks of sequences that an engine still has; least use goes first, and of one sequence its end."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, float] = OrderedDict()

    def count(self, keys: Sequence[int]) -> int:
        """Return how many of the first blocks are there."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def use(self, keys: Sequence[int], now: float) -> None:
        """Note that these blocks are used, or computed, now."""
        for key in reversed(keys):
            self._blocks[key] = now
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def oldest_s(self, now: float) -> float | None:
        """Return the age of what was not used for longest; None: it is empty."""
        return None if not self._blocks else now - next(iter(self._blocks.values()))


@dataclass(slots=True, eq=False)
class Engine:
    """One worker."""

    name: str
    shape: EngineShape
    speed: float = 1.0
    line: deque[Job] = field(default_factory=deque)
    """Jobs that wait at this worker, for ways that know no queue."""
    may_take_placed: bool = True
    """False: its last slot went to a placed request while others queued."""
    prefilled: int = 0
    """Prompt tokens that it computed."""
    queries: int = 0
    """Prompt tokens of its requests."""
    _cache: BlockCache = field(init=False)
    _prefilling: deque[Job] = field(default_factory=deque)
    _running: list[tuple[float, int, Job]] = field(default_factory=list)
    _progress: float = 0.0
    _at: float = 0.0
    _serial: int = 0
    # Of the time in which something decoded, and of the tokens that came of it; both are forgotten slowly.
    _decode_s: float = 0.0
    _decoded: float = 0.0

    def __post_init__(self) -> None:
        """Make its cache."""
        self._cache = BlockCache(self.shape.cache_tokens // self.shape.block_tokens)

    @property
    def free_slots(self) -> int:
        """Requests that it would begin at once."""
        return self.shape.slots - len(self._running) - len(self._prefilling)

    def start(self, job: Job, now: float) -> None:
        """Begin with a request, after `advance`; its blocks can be shared from now."""
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
        """Return when something ends here."""
        if self._prefilling:
            return self._at + self._prefilling[0].left_s
        if self._running:
            return self._at + max(self._running[0][0] - self._progress, 0.0) * self._step_s
        return math.inf

    def advance(self, now: float) -> tuple[list[Job], list[Job]]:
        """Compute until `now`, at most until `next_at`; returns whose first token is there, and what has ended."""
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
        """Count the time as real workers do: steps that make tokens take longer while prompts are computed."""
        if self._running:
            kept = math.exp(-seconds / MEMORY_S)
            made = 0.0 if self._prefilling else len(self._running) * seconds / self._step_s
            self._decode_s, self._decoded = self._decode_s * kept + seconds, self._decoded * kept + made

    def presence(self, now: float) -> WorkerPresence:
        """Return what it announces."""
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
