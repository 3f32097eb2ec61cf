"""The age of the oldest prefix that the real engine reports: an older prefix is no longer in its cache."""

import asyncio
import time
from typing import Any

import pytest

from rollbus.schemas.presence import EngineStats
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.feed import LoadMeter
from tests.engine.support import prompt
from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm


PROMPT_LEN = 300
FIRST = 1000
"""The seed of the first prompt. The other prompts have the next seeds."""
MAX_OTHERS = 12
"""The maximum of other prompts. Each has nine whole blocks and the cache has 63, so seven prompts fill it."""


def request_of(seed: int) -> GenerateRequest:
    """Return a request whose prompt is unique."""
    return GenerateRequest(
        prompt_token_ids=prompt(PROMPT_LEN, seed=seed),
        sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        cache_salt="prefix age",
    )


def test_only_prefixes_younger_than_the_reported_age_are_in_the_cache(moe: RunningEngine) -> None:
    """A prefix older than the reported age is gone from the cache, and a younger prefix is in it."""
    moe.generate(request_of(FIRST))
    used_at = time.monotonic()
    for seed in range(FIRST + 1, FIRST + MAX_OTHERS):
        moe.generate(request_of(seed))
        # The time is read before the age, so a prefix that seems older than the age is older.
        asked_at = time.monotonic()
        oldest_s = moe.engine.oldest_prefix_s
        if oldest_s is not None and used_at < asked_at - oldest_s:
            break
    else:
        pytest.fail(f"after {MAX_OTHERS} other prompts it is not older than announced: {oldest_s}")
    [last] = moe.generate(request_of(seed))
    assert last.steps[0].cached_tokens == 288
    [first] = moe.generate(request_of(FIRST))
    assert first.steps[0].cached_tokens == 0


# `LoadMeter` adds up the load reports of vLLM's engine cores. The tests use vLLM's own classes, but no engine.


def step(at: float, *outputs: Any, engine: int = 0, **stats: Any) -> Any:
    """Return one step of one engine core."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    told = SchedulerStats(**stats) if stats else None
    return EngineCoreOutputs(engine_index=engine, outputs=list(outputs), scheduler_stats=told, timestamp=at)


def output(num_tokens: int, *, computed: int | None = None, scheduled_at: float = 0.0, preempted: int = 0) -> Any:
    """Return one request's output of a step; `computed` is set for its first tokens."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
    from vllm.v1.metrics.stats import PrefillStats

    events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.0)] * preempted
    if computed is not None:
        events.append(EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled_at))
    prefill = None if computed is None else PrefillStats(num_computed_tokens=computed)
    return EngineCoreOutput("r", [7] * num_tokens, events=events or None, prefill_stats=prefill)


def test_counts_of_replicas_are_added_and_their_cache_use_is_averaged() -> None:
    """Requests, counts and rates of replicas are added. The use of their KV caches is averaged."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    meter = LoadMeter()
    cache = PrefixCacheStats(queries=100, hits=32)
    for engine, start in enumerate((50.0, 9000.0)):
        first = output(1, computed=500, scheduled_at=start)
        meter.add(
            step(
                start + 0.5, first, engine=engine, num_running_reqs=2, num_waiting_reqs=1, num_skipped_waiting_reqs=1,
                kv_cache_usage=0.25 + 0.5 * engine, prefix_cache_stats=cache,
            )
        )  # fmt: skip
        # Two requests, of which the second produced two tokens, as with speculative decoding.
        meter.add(step(start + 0.6, output(1), output(2, preempted=1), engine=engine))

    assert meter.stats() == EngineStats(
        kv_cache_use=0.5,
        running=4,
        waiting=4,
        preemptions=2,
        prefix_cache_queries=200,
        prefix_cache_hits=64,
        prefill_tokens_per_s=2000.0,
        decode_tokens_per_s=60.0,
    )


def test_after_the_warm_up_an_idle_engine_reports_no_requests_and_no_rate() -> None:
    """After the warm-up, an idle engine reports 0 running requests and no rate."""
    meter = LoadMeter()
    meter.add(step(10.0, output(1, computed=5, scheduled_at=9.0), num_running_reqs=0))
    meter.restart()

    assert meter.stats() == EngineStats(
        kv_cache_use=0.0, running=0, waiting=0, preemptions=0, prefix_cache_queries=0, prefix_cache_hits=0
    )


def test_an_engine_without_statistics_reports_only_the_decode_rate() -> None:
    """For an engine without statistics, only the decode rate is known."""
    meter = LoadMeter()
    meter.add(step(10.0, output(1)))
    meter.add(step(10.5, output(1)))

    assert meter.stats() == EngineStats(decode_tokens_per_s=2.0)


# The load that the real engine reports is that of its scheduler.


def request_of_of_stats(seed: int, prompt_len: int, max_tokens: int) -> GenerateRequest:
    """Return a greedy request."""
    return GenerateRequest(
        prompt_token_ids=prompt(prompt_len, seed=seed),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        cache_salt="stats",
    )


def test_prefix_hits_are_those_of_the_requests(moe: RunningEngine) -> None:
    """Queries grow by the prompts' tokens, and hits by the cached tokens that the second request reports."""
    before = moe.engine.stats
    moe.generate(request_of_of_stats(1, 300, 2))
    between = moe.engine.stats
    [second] = moe.generate(request_of_of_stats(1, 300, 2))
    after = moe.engine.stats

    cached = second.steps[0].cached_tokens
    assert cached
    assert None not in (before.prefix_cache_queries, before.prefix_cache_hits)
    queries = [stats.prefix_cache_queries or 0 for stats in (before, between, after)]
    hits = [stats.prefix_cache_hits or 0 for stats in (before, between, after)]
    assert [queries[1] - queries[0], queries[2] - queries[1]] == [300, 300]
    assert [hits[1] - hits[0], hits[2] - hits[1]] == [0, cached]


def test_kv_use_counts_the_blocks_of_running_requests(moe: RunningEngine) -> None:
    """Two requests of 100 tokens hold 4 blocks of 32 each, of 64 blocks of which vLLM reserves one.

    After their end, no block is held.
    """

    async def run() -> None:
        engine = moe.engine
        keys = [await moe.add(request_of_of_stats(10 + number, 100, 20)) for number in range(2)]
        begun: set[str] = set()
        while len(begun) < 2:
            begun |= {step.key for step in await moe.next() if len(step.token_ids)}
        stats = engine.stats
        assert (stats.running, stats.waiting) == (2, 0)
        # The second request may have begun when the first was some tokens ahead.
        assert stats.kv_cache_use == pytest.approx(8 / 63, abs=2 / 63)
        await engine.abort(keys)
        await moe.finish(*keys)
        while engine.stats.running:
            await moe.add(request_of_of_stats(20, 4, 1))
            await moe.next()

    moe.call(run())
    moe.generate(request_of_of_stats(21, 4, 1))
    assert (moe.engine.stats.running, moe.engine.stats.waiting, moe.engine.stats.kv_cache_use) == (0, 0, 0.0)


def test_a_step_that_only_computes_a_part_of_a_prompt_is_progress(moe: RunningEngine) -> None:
    """The first step of a long prompt has no output. The engine yields it, because it is not hung."""

    async def run() -> None:
        await moe.add(request_of_of_stats(25, 500, 1))
        assert not await anext(moe._steps)

    moe.call(run())


def test_preemptions_are_counted(moe: RunningEngine, preemptions: list[str]) -> None:
    """If the requests do not fit together, the count of preemptions equals the engine core's reports."""
    before = moe.engine.stats.preemptions
    assert before is not None
    moe.generate(*(request_of_of_stats(30 + number, 150, 250) for number in range(8)))

    assert preemptions
    assert moe.engine.stats.preemptions == before + len(preemptions)


def test_an_idle_engine_keeps_the_rates_of_its_last_request(moe: RunningEngine) -> None:
    """Prompt and token rates are measured, also around a pause. An idle engine keeps its last rates."""

    async def run() -> None:
        key = await moe.add(request_of_of_stats(40, 300, 40))
        async with asyncio.TaskGroup() as group:
            group.create_task(moe.finish(key))
            await moe.engine.pause()
            await moe.engine.resume()

    moe.call(run())
    before = moe.engine.stats
    assert before.prefill_tokens_per_s
    assert before.decode_tokens_per_s
    assert moe.engine.stats == before
