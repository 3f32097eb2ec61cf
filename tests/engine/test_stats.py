"""The load that the real engine reports is that of its scheduler."""

import asyncio

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt
from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm


def request_of(seed: int, prompt_len: int, max_tokens: int) -> GenerateRequest:
    """Return a greedy request."""
    return GenerateRequest(
        prompt_token_ids=prompt(prompt_len, seed=seed),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        cache_salt="stats",
    )


def test_prefix_hits_are_those_of_the_requests(moe: RunningEngine) -> None:
    """Queries grow by the prompts' tokens, and hits by the cached tokens that the second request reports."""
    before = moe.engine.stats
    moe.generate(request_of(1, 300, 2))
    between = moe.engine.stats
    [second] = moe.generate(request_of(1, 300, 2))
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
        keys = [await moe.add(request_of(10 + number, 100, 20)) for number in range(2)]
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
            await moe.add(request_of(20, 4, 1))
            await moe.next()

    moe.call(run())
    moe.generate(request_of(21, 4, 1))
    assert (moe.engine.stats.running, moe.engine.stats.waiting, moe.engine.stats.kv_cache_use) == (0, 0, 0.0)


def test_preemptions_are_counted(moe: RunningEngine, preemptions: list[str]) -> None:
    """If the requests do not fit together, the count of preemptions equals the engine core's reports."""
    before = moe.engine.stats.preemptions
    assert before is not None
    moe.generate(*(request_of(30 + number, 150, 250) for number in range(8)))

    assert preemptions
    assert moe.engine.stats.preemptions == before + len(preemptions)


def test_an_idle_engine_keeps_the_rates_of_its_last_request(moe: RunningEngine) -> None:
    """Prompt and token rates are measured, also around a pause. An idle engine keeps its last rates."""

    async def run() -> None:
        key = await moe.add(request_of(40, 300, 40))
        async with asyncio.TaskGroup() as group:
            group.create_task(moe.finish(key))
            await moe.engine.pause()
            await moe.engine.resume()

    moe.call(run())
    before = moe.engine.stats
    assert before.prefill_tokens_per_s
    assert before.decode_tokens_per_s
    assert moe.engine.stats == before
