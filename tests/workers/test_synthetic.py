"""The synthetic engine supports all calls of a controller, and simulates the configured faults."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

import rollbus
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.presence import EngineStats
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import PrefixCache
from tests.support.fleet import synthetic_worker, until_worker

Collected = dict[str, list[RequestStep]]


def request(length: int = 40, num_tokens: int = 4, **fields: object) -> GenerateRequest:
    """Return a greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=list(range(length)), sampling=sampling, **fields)  # type: ignore[arg-type]


class Reader:
    """Reads an engine's steps, and notifies waiters of new steps."""

    def __init__(self, engine: SyntheticEngine) -> None:
        self.engine = engine
        self.steps: Collected = {}
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Read until cancelled."""
        async for steps in self.engine.steps():
            async with self._changed:
                for step in split(steps):
                    self.steps.setdefault(step.key, []).append(step)
                self._changed.notify_all()

    async def until_tokens(self, key: str, count: int) -> None:
        """Wait until a request has `count` steps."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.steps.get(key, ())) >= count)

    async def result(self, key: str, asked: GenerateRequest) -> list[RequestStep]:
        """Run one request to its end, and return its steps."""
        await self.engine.add(key, asked)
        return await self.end_of(key)

    async def end_of(self, key: str) -> list[RequestStep]:
        """Wait for a request's end, and return its steps."""
        async with self._changed:
            await self._changed.wait_for(lambda: key in self.steps and self.steps[key][-1].finish_reason is not None)
        return self.steps[key]


@contextlib.asynccontextmanager
async def reading(engine: SyntheticEngine) -> AsyncIterator[Reader]:
    """Start an engine, and yield a reader of its steps."""
    await engine.start()
    reader = Reader(engine)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reader.run(), name="reader")
        yield reader
        task.cancel()


def tokens(steps: list[RequestStep]) -> list[int]:
    """Return the sampled tokens."""
    return [int(token) for step in steps for token in step.token_ids]


async def test_a_paused_engine_makes_no_step_and_resumes_without_a_difference() -> None:
    """Tokens that were sampled before are delivered when `pause` returns.

    The stream then equals a stream without a pause.
    """
    async with reading(SyntheticEngine()) as reader:
        undisturbed = tokens(await reader.result("a", request(num_tokens=200)))
        await reader.engine.add("b", request(num_tokens=200))
        await reader.until_tokens("b", 3)
        await reader.engine.pause()
        await reader.engine.pause()
        count = len(reader.steps["b"])
        await reader.engine.add("c", request())
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(reader.steps["b"]) == count < 200
        assert "c" not in reader.steps
        await reader.engine.resume()
        assert tokens(await reader.end_of("b")) == undisturbed
        await reader.end_of("c")


# The synthetic engine computes its requests together, with the same results as alone.


CONFIG = SyntheticConfig(vocab_size=24, max_model_len=48)
"""A vocabulary so small that requests meet the end of the sequence and their stop tokens."""
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "greedy": ({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}, {}),
    "to the end": ({"temperature": 0.0, "max_tokens": None}, {}),
    "not before": ({"temperature": 0.0, "max_tokens": 30, "min_tokens": 25}, {}),
    "unseeded": ({"max_tokens": 12}, {}),
    "seeded": ({"max_tokens": 15, "seed": 7, "ignore_eos": True}, {"return_routed_experts": False}),
    "penalties": ({"temperature": 0.0, "max_tokens": 15, "presence_penalty": 0.5}, {"routed_experts_prompt_start": 3}),
    "stop tokens": ({"temperature": 0.0, "max_tokens": 40, "stop_token_ids": [3, 5, 8, 13]}, {}),
    "allowed tokens": ({"max_tokens": 9, "allowed_token_ids": [2, 4, 6], "ignore_eos": True}, {}),
    "top logprobs": ({"temperature": 0.0, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2}, {}),
    "no logprobs": ({"temperature": 0.0, "max_tokens": 5, "logprobs": None}, {}),
}
"""Sampling parameters, and fields of the request."""


def request_of_synthetic_batch(kind: str) -> GenerateRequest:
    """Return a request of this kind with a unique prompt."""
    sampling, fields = KINDS[kind]
    prompt = [(len(kind) * i) % 24 for i in range(1, 8)]
    return GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(**sampling), **fields)  # type: ignore[arg-type]


def in_full(step: RequestStep) -> tuple[object, ...]:
    """Return all fields of a step in a form that can be compared."""
    arrays = step.token_ids, step.logprobs, step.routed_experts
    bytes_of = [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in arrays]
    rest = step.top_logprobs, step.prompt_logprobs, step.routed_experts_start, step.cached_tokens
    return (*bytes_of, *rest, step.finish_reason, step.stop_reason)


async def run(joining: list[list[str]], aborted: dict[int, str] | None = None) -> dict[str, list[RequestStep]]:
    """Return the engine's steps of requests with their kind as key, some of which join at each step."""
    engine = SyntheticEngine(CONFIG)
    await engine.start()
    made: dict[str, list[RequestStep]] = {}
    num_open = sum(map(len, joining))
    for kind in joining[0]:
        await engine.add(kind, request_of_synthetic_batch(kind))
    num_steps = 0
    async for steps in engine.steps():
        num_steps += 1
        for step in split(steps):
            made.setdefault(step.key, []).append(step)
            num_open -= step.finish_reason is not None
        if not num_open:
            break
        for kind in joining[num_steps] if num_steps < len(joining) else ():
            await engine.add(kind, request_of_synthetic_batch(kind))
        if aborted and num_steps in aborted:
            await engine.abort([aborted[num_steps]])
    return made


@pytest.mark.parametrize("per_step", [1, 3, len(KINDS)])
async def test_a_request_gets_the_same_bits_beside_other_requests_as_alone(per_step: int) -> None:
    """A request gets the same bits as alone, whatever requests join, end and are aborted beside it."""
    kinds = list(KINDS)
    joining = [kinds[i : i + per_step] for i in range(0, len(kinds), per_step)]
    together = await run(joining, {6: "greedy"})
    for kind in kinds:
        alone = (await run([[kind]]))[kind]
        shared = together[kind]
        if kind == "greedy":
            assert shared.pop().finish_reason is FinishReason.ABORT
            assert len(shared) < len(alone)
            alone = alone[: len(shared)]
        assert [in_full(step) for step in shared] == [in_full(step) for step in alone]


async def test_requests_end_where_the_sampling_parameters_require() -> None:
    """Requests end at the end of sequence, at stop tokens and at their lengths, and never earlier."""
    made = await run([list(KINDS)])
    ends = {kind: (len(steps), steps[-1].finish_reason, steps[-1].stop_reason) for kind, steps in made.items()}
    assert ends["greedy"] == (20, FinishReason.LENGTH, None)
    assert ends["allowed tokens"] == (9, FinishReason.LENGTH, None)
    num_tokens, reason, stop_token = ends["stop tokens"]
    assert reason is FinishReason.STOP
    assert stop_token == made["stop tokens"][-1].token_ids[0]
    assert all(step.token_ids[0] not in (2, 3, 5, 8, 13) for step in made["stop tokens"][: num_tokens - 1])
    for kind, least in (("to the end", 1), ("not before", 26)):
        num_tokens, reason, _ = ends[kind]
        sampled = [int(step.token_ids[0]) for step in made[kind]]
        assert num_tokens >= least
        assert (sampled[-1] == 2) == (reason is FinishReason.STOP)
        assert 2 not in sampled[:-1]


async def test_the_tokens_never_change_between_releases() -> None:
    """The tokens never change between releases, so that bench figures and fault reports stay comparable."""
    made = await run([["greedy", "seeded", "penalties"]])
    tokens = {kind: np.concatenate([step.token_ids for step in steps])[:6].tolist() for kind, steps in made.items()}
    assert tokens == {
        "greedy": [7, 8, 4, 19, 23, 15],
        "seeded": [3, 11, 21, 1, 22, 19],
        "penalties": [12, 16, 20, 1, 22, 16],
    }


# The load that a synthetic engine reports.


PROMPT = list(range(3, 103))


def request_of_synthetic_stats(prompt: list[int], max_tokens: int = 4) -> rollbus.GenerateRequest:
    """Return a request that runs to its limit."""
    return rollbus.GenerateRequest(
        prompt_token_ids=prompt, sampling=rollbus.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )


async def test_the_stats_count_running_and_waiting_requests_and_their_kv() -> None:
    """Requests beyond the batch size wait, and the KV cache holds the tokens of running requests.

    Preempted requests are counted.
    """
    engine = SyntheticEngine(SyntheticConfig(max_num_seqs=2, kv_cache_tokens=1000))
    assert engine.stats == EngineStats(kv_cache_use=0.0, running=0, waiting=0, preemptions=0, kv_cache_tokens=1000)
    await engine.start()
    for key in "abc":
        await engine.add(key, request_of_synthetic_stats(PROMPT, 100))
    steps = engine.steps()
    await anext(steps)

    stats = engine.stats
    assert (stats.running, stats.waiting, stats.kv_cache_use) == (2, 1, 0.2)
    assert stats.prefill_tokens_per_s is not None
    assert stats.decode_tokens_per_s is None
    await engine.reset_cache(preempt=True)
    await anext(steps)
    assert engine.stats.preemptions == 2
    assert engine.stats.decode_tokens_per_s is not None
    await engine.abort(["a", "b", "c"])
    await anext(steps)
    assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_cache_use) == (0, 0, 0.0)
    await engine.close()


async def test_without_a_prefix_cache_its_queries_and_hits_are_none(nats_url: str, fleet: str) -> None:
    """Queries and hits of the prefix cache are in tokens, as clients read them.

    Without a prefix cache they are None, not 0.
    """
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w", config=SyntheticConfig(prefix_cache=True)),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        before = await until_worker(rb, "w", lambda worker: worker.engine_stats)
        await rb.complete(request_of_synthetic_stats(PROMPT))
        await rb.complete(request_of_synthetic_stats(PROMPT))
        queried = await until_worker(
            rb, "w", lambda worker: worker.engine_stats and worker.engine_stats.prefix_cache_hits
        )
    assert before.engine_stats.prefix_cache_hits == 0
    counted = (before.engine_stats.prefix_cache_queries or 0) + 2 * len(PROMPT)
    assert queried.engine_stats.prefix_cache_queries == counted
    assert queried.engine_stats.prefix_cache_hits == 96
    assert SyntheticEngine().stats.prefix_cache_queries is None


async def test_cached_prompt_tokens_cost_no_prefill_time() -> None:
    """The prefill rate is that of the configured cost, and cached tokens cost nothing."""
    cost_s = 0.0001
    engine = SyntheticEngine(SyntheticConfig(prefix_cache=True, prefill_token_s=cost_s))
    await engine.start()
    steps = engine.steps()
    rates = []
    for number in range(2):
        await engine.add(str(number), request_of_synthetic_stats(PROMPT, 1))
        [step] = await anext(steps)
        assert step.cached_tokens == 96 * number  # type: ignore[union-attr]
        rates.append(engine.stats.prefill_tokens_per_s)
    assert None not in rates
    assert rates[0] <= 1 / cost_s
    # The second prefill computed four tokens, and measurements are weighted by their tokens.
    assert rates[1] <= 1 / cost_s
    await engine.close()


def test_the_prefix_cache_evicts_the_least_recently_used_blocks() -> None:
    """The prefix cache evicts the least recently used blocks, and the end of a prompt before its beginning.

    A beginning is useful without its end.
    """
    cache = PrefixCache(max_tokens=4 * 16)
    first, second = np.arange(49, dtype=np.uint64), np.arange(100, 149, dtype=np.uint64)
    assert [cache.add_prompt("", prompt) for prompt in (first, first, second)] == [0, 48, 0]
    assert len(cache) == 4
    assert cache.add_prompt("", first) == 16
    assert cache.add_prompt("", second) == 16


def test_a_prefix_cache_has_no_age_until_its_first_eviction() -> None:
    """A prefix cache has no age until its first eviction, and again after a clear.

    Then all prompts that were used before the oldest prefix are evicted.
    """
    cache = PrefixCache(max_tokens=4 * 16)
    prompts = [np.arange(start, start + 33, dtype=np.uint64) for start in (0, 100, 200)]
    used_at = []
    for prompt in prompts:
        assert cache.oldest_s(time.monotonic()) is None
        used_at.append(time.monotonic())
        cache.add_prompt("", prompt)
        used_at.append(time.monotonic())
    oldest_s = cache.oldest_s(used_at[-1])
    assert oldest_s is not None
    # The first prompt is evicted, so the oldest one is the second.
    assert used_at[2] <= used_at[-1] - oldest_s <= used_at[3]
    cache.clear()
    assert cache.oldest_s(used_at[-1]) is None
