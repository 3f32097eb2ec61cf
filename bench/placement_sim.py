"""A simulated fleet for `bench.placement`: a client, a queue, workers, and a way to choose.

Messages behave as on the bus. Workers publish presence once a second. A worker accepts a placed request immediately, or
rejects it, and the request goes to the queue. Workers with free slots pull in turns. While requests wait in the queue,
placed requests get at most every second slot that becomes free. Requests that follow the first request of their group
wait at its worker. This worker pulls no other request before them.

A worker has slots, a prefill rate, steps that grow with the batch, and a bounded cache. Times are times of the
simulation. Prompts are computed one after the other, like chunked prefill with a full budget. Decoding waits during
this time. After it, each running request gets one token per step.
"""

import heapq
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.placement_traces import Conversation, Tokens, Trace, block_keys
from rollbus.bus.protocol.queue.fairness import MAX_FOLLOWERS
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


LATENCY_S: Final = 0.001
"""Seconds of one message."""
PRESENCE_S: Final = 1.0
MAX_WAITING: Final = MAX_FOLLOWERS // 2
"""Turns of sessions that wait at a worker. The simulation does not reject a line that stands still for 2 s."""
SLOW: Final = 0.5
"""Speed of a slow worker."""


class QueueOnly:
    """Places no request: all requests go to the queue. Other ways choose a worker, or the queue, for each request."""

    waits_at_worker = False
    """True if the chosen worker accepts the request even when it is full. The request then waits there."""
    follows = False
    """True if a sample without a worker follows the first sample of its group to the worker that accepts that
    sample."""

    def announced(self, presence: WorkerPresence, now: float) -> None:
        """Process the presence of a worker."""

    def place(self, job: Job, count: int, now: float) -> Sequence[str | None]:
        """Return the worker or None for each of `count` samples of `job`'s request."""
        return [None] * count

    def follow(self, job: Job, worker: str, now: float, *, is_queueing: bool) -> str:
        """Return the worker of `job`, which follows the first request of its group to `worker`.

        Args:
            is_queueing: True if other requests wait in the queue.
        """
        return worker

    def may_wait(self, job: Job) -> bool:
        """Return True if a placed request may wait at its worker for a placed turn."""
        return False

    def admitted(self, job: Job, worker: str, now: float) -> None:
        """Record that a worker has started a request."""

    def ended(self, job: Job, worker: str, now: float) -> None:
        """Record that a request has ended."""

    def refused(self, job: Job, worker: str, now: float) -> None:
        """Record that a worker was too full for a placed request."""


@dataclass(slots=True)
class Simulation:
    """A simulation of one trace, one way and one fleet. Call `run` once."""

    trace: Trace
    way: QueueOnly
    shape: EngineShape
    num_workers: int
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    refused: int = 0
    placed: int = 0
    decisions_s: list[float] = field(default_factory=list)
    """Real seconds of each decision."""
    engines: dict[str, Engine] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _serials: "itertools.count[int]" = field(default_factory=itertools.count)
    _queue: deque[Job] = field(default_factory=deque)
    _pulling: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _pending: deque[Conversation] = field(default_factory=deque)
    _leaders: dict[str, Job] = field(default_factory=dict)
    _followers: dict[Job, list[Job]] = field(default_factory=dict)
    _in_flight: int = 0
    _wakes: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Play the trace to its end."""
        for i in range(self.num_workers):
            speed = SLOW if i < self.trace.num_slow else 1.0
            engine = Engine(f"w{i}", self.shape, speed)
            self.engines[engine.name] = engine
            self._pulling[engine.name] = None
            self.way.announced(engine.presence(0.0), 0.0)
            self._at(PRESENCE_S * i / self.num_workers, self._announce, engine)
        self._pending.extend(self.trace.conversations)
        self._begin()
        while self._in_flight:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)

    def _at(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._serials), call, args))

    def _announce(self, engine: Engine) -> None:
        self._advance(engine)
        self._at(LATENCY_S, self._handle_presence, engine.presence(self.now))
        self._at(PRESENCE_S, self._announce, engine)

    def _handle_presence(self, presence: WorkerPresence) -> None:
        self.way.announced(presence, self.now)

    # The client

    def _begin(self) -> None:
        """Start as many conversations as may be in flight."""
        while self._pending and self._in_flight + self._pending[0].room <= self.trace.max_in_flight:
            conversation = self._pending.popleft()
            self._in_flight += conversation.samples
            self._submit(conversation, 0, np.empty(0, np.int32))

    def _submit(self, conversation: Conversation, turn: int, before: Tokens, known: Sequence[int] = ()) -> None:
        wanted = conversation.turns[turn]
        prompt = np.concatenate([before, wanted.new_tokens])
        keys = block_keys(prompt, self.shape.block_tokens, known)
        jobs = []
        for sample in range(conversation.samples):
            made = np.random.default_rng([sample, len(self.jobs)]).integers(10, 500, wanted.max_tokens, np.int32)
            sequence = np.concatenate([prompt, made])
            sequence_keys = block_keys(sequence, self.shape.block_tokens, keys)
            jobs.append(Job(conversation, turn, sample, prompt, keys, sequence, sequence_keys, self.now))
        self.jobs.extend(jobs)
        began = time.perf_counter()
        waits = self.way.follows and jobs[0].group is not None and bool(self._queue)
        workers = [None] * len(jobs) if waits else self.way.place(jobs[0], len(jobs), self.now)
        self.decisions_s.append(time.perf_counter() - began)
        self._send(jobs, workers)

    def _send(self, jobs: Sequence[Job], workers: Sequence[str | None]) -> None:
        for job, worker in zip(jobs, workers, strict=True):
            group = job.group
            leader = None if group is None else self._leaders.setdefault(group, job)
            if worker is not None:
                self._at(LATENCY_S, self._offer, self.engines[worker], job)
            elif self.way.follows and leader is not None and leader is not job:
                self._followers.setdefault(leader, []).append(job)
            else:
                self._at(LATENCY_S, self._enqueue, job)

    def _release(self, leader: Job, worker: str) -> None:
        """Process that a worker has started the first request of a group. Send it the requests that follow."""
        self.way.admitted(leader, worker, self.now)
        if leader.group is not None and self._leaders.get(leader.group) is leader:
            del self._leaders[leader.group]
        for job in self._followers.pop(leader, ()):
            chosen = self.way.follow(job, worker, self.now, is_queueing=bool(self._queue))
            self._at(LATENCY_S, self._wait_at, self.engines[chosen], job)

    def _wait_at(self, engine: Engine, job: Job) -> None:
        """Let a request that follows another request wait for a slot."""
        self._advance(engine)
        self.placed += 1
        job.is_placed = True
        engine.line.append(job)
        self._pull(engine, engine.free_slots)

    def _end(self, job: Job, worker: str) -> None:
        self.way.ended(job, worker, self.now)
        conversation = job.conversation
        if job.turn + 1 < len(conversation.turns):
            pause_s = conversation.turns[job.turn + 1].pause_s
            self._at(pause_s, self._submit, conversation, job.turn + 1, job.sequence, job.sequence_keys)
        else:
            self._in_flight -= 1
            self._begin()

    # The workers

    def _offer(self, engine: Engine, job: Job) -> None:
        """Let a worker accept or reject a placed request."""
        self._advance(engine)
        self.placed += 1
        job.is_placed = True
        if engine.free_slots > 0 and (engine.may_take_placed or not self._queue):
            engine.may_take_placed = not self._queue
            self._start(engine, job)
        elif self.way.waits_at_worker or (self.way.may_wait(job) and len(engine.line) < MAX_WAITING):
            engine.line.append(job)
        else:
            self._at(LATENCY_S, self._refuse, engine, job)

    def _refuse(self, engine: Engine, job: Job) -> None:
        """Send a rejected request to the queue, or let it follow the first request of its group."""
        self.refused += 1
        self.way.refused(job, engine.name, self.now)
        job.is_placed = False
        self._send([job], [None])

    def _enqueue(self, job: Job) -> None:
        self._queue.append(job)
        while self._queue and self._pulling:
            engine = self.engines[self._pulling.popitem(last=False)[0]]
            self._advance(engine)
            self._pull(engine, 1)

    def _pull(self, engine: Engine, count: int) -> None:
        """Give the worker at most `count` waiting requests, as long as it has free slots."""
        while count > 0 and engine.free_slots > 0 and (engine.line or self._queue):
            if engine.line and (engine.may_take_placed or not self._queue or not self.way.may_wait(engine.line[0])):
                if self.way.may_wait(engine.line[0]):
                    engine.may_take_placed = not self._queue
                self._start(engine, engine.line.popleft())
            else:
                engine.may_take_placed = True
                job = self._queue.popleft()
                # Requests that follow this request come before the next request that the worker pulls.
                count -= len(self._followers.get(job, ()))
                self._start(engine, job)
            count -= 1
        if engine.free_slots > 0:
            self._pulling[engine.name] = None

    def _start(self, engine: Engine, job: Job) -> None:
        engine.start(job, self.now)
        if engine.free_slots <= 0:
            self._pulling.pop(engine.name, None)
        self._at(LATENCY_S, self._release, job, engine.name)
        self._wake(engine)

    def _wake(self, engine: Engine) -> None:
        """Schedule a check of this engine for the time at which its next prefill or request ends."""
        at = engine.next_at()
        self._wakes[engine.name] = at
        if at < float("inf"):
            self._at(max(at - self.now, 0.0), self._look, engine, at)

    def _look(self, engine: Engine, at: float) -> None:
        if self._wakes.get(engine.name) == at:
            self._advance(engine)
            self._wake(engine)

    def _advance(self, engine: Engine) -> None:
        first, ended = engine.advance(self.now)
        for job in ended:
            self._at(LATENCY_S, self._end, job, engine.name)
        if ended:
            self._pull(engine, len(ended))
        if first or ended:
            self._wake(engine)
