"""The load that a synthetic engine reports."""

import asyncio
import time

import numpy as np

import rollbus
from rollbus.schemas.presence import EngineStats
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import PrefixCache
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_worker

PROMPT = list(range(3, 103))


def request(prompt: list[int], max_tokens: int = 4) -> rollbus.GenerateRequest:
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
        await engine.add(key, request(PROMPT, 100))
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
        await rb.complete(request(PROMPT))
        await rb.complete(request(PROMPT))
        queried = await until_worker(
            rb, "w", lambda worker: worker.engine_stats and worker.engine_stats.prefix_cache_hits
        )
    assert before.engine_stats.prefix_cache_hits == 0
    counted = (before.engine_stats.prefix_cache_queries or 0) + 2 * len(PROMPT)
    assert queried.engine_stats.prefix_cache_queries == counted
    assert queried.engine_stats.prefix_cache_hits == 96
    assert SyntheticEngine().stats.prefix_cache_queries is None


async def test_prefill_and_decode_rates_stay_within_the_step_time() -> None:
    """Prefill and decode rates are not above the rate that the step time allows."""
    step_s = 0.02
    engine = SyntheticEngine(SyntheticConfig(step_s=step_s, max_num_seqs=4))
    await engine.start()
    for number in range(4):
        await engine.add(str(number), request(PROMPT, 5))
    async for steps in engine.steps():
        if not engine.stats.running:
            break
        assert steps
        await asyncio.sleep(0)
    stats = engine.stats
    assert stats.prefill_tokens_per_s is not None
    assert stats.decode_tokens_per_s is not None
    assert 0 < stats.prefill_tokens_per_s <= 4 * len(PROMPT) / step_s
    assert 0 < stats.decode_tokens_per_s <= 4 / step_s
    await engine.close()


async def test_cached_prompt_tokens_cost_no_prefill_time() -> None:
    """The prefill rate is that of the configured cost, and cached tokens cost nothing."""
    cost_s = 0.0001
    engine = SyntheticEngine(SyntheticConfig(prefix_cache=True, prefill_token_s=cost_s))
    await engine.start()
    steps = engine.steps()
    rates = []
    for number in range(2):
        await engine.add(str(number), request(PROMPT, 1))
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
