"""Reading through `AsyncLLM.generate` gives the same results as reading the engine core's steps, but later."""

import asyncio

import numpy as np
import pytest

from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.generate_feed import MAX_WAITING
from tests.engine.support import prompt, rows_here
from tests.support.results import TOLERANCE, expert_sets
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_both_feeds_give_the_same_results(moe: RunningEngine, fallback: RunningEngine) -> None:
    """The results do not depend on how the engine is read.

    This holds for tokens, log probabilities, alternatives, prompt log probabilities and routed experts.
    """
    request = GenerateRequest(
        prompt_token_ids=prompt(120, seed=40),
        sampling=SamplingParams(
            max_tokens=20, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True, stop_token_ids=[3]
        ),
        routed_experts_prompt_start=20,
        cache_salt="both",
    )

    (core,), (generate,) = moe.generate(request), fallback.generate(request)

    assert core.token_ids == generate.token_ids
    assert np.abs(core.logprobs - generate.logprobs).max() < TOLERANCE
    assert np.array_equal(expert_sets(core.rows), expert_sets(generate.rows))
    assert len(generate.steps) > 1
    assert generate.steps[0].routed_experts_start == core.steps[0].routed_experts_start == 20
    for mine, theirs in ((core.steps[0], generate.steps[0]),):
        assert mine.top_logprobs is not None
        assert theirs.top_logprobs is not None
        assert np.array_equal(mine.top_logprobs.token_ids[0], theirs.top_logprobs.token_ids[0])
        assert mine.prompt_logprobs is not None
        assert theirs.prompt_logprobs is not None
        assert np.abs(mine.prompt_logprobs.logprobs - theirs.prompt_logprobs.logprobs).max() < TOLERANCE
        assert mine.prompt_logprobs.top is not None
        assert theirs.prompt_logprobs.top is not None
        assert mine.prompt_logprobs.top.logprobs.shape == theirs.prompt_logprobs.top.logprobs.shape
        assert mine.cached_tokens == theirs.cached_tokens == 0


def test_late_reader_loses_no_rows(fallback: RunningEngine) -> None:
    """Every token and row arrives, also if outputs accumulate and vLLM merges them into later outputs."""
    requests = [
        GenerateRequest(
            prompt_token_ids=prompt(20, seed=number), sampling=SamplingParams(max_tokens=40, ignore_eos=True)
        )
        for number in range(100)
    ]

    async def read_late() -> dict[str, Result]:
        keys = [await fallback.add(request) for request in requests]
        # The delay is long enough for more outputs than the limit of waiting outputs.
        await asyncio.sleep(1.0)
        return await fallback.finish(*keys)

    results = fallback.call(read_late()).values()

    assert sum(len(result.steps) for result in results) < len(requests) * 40
    assert len(requests) * 40 > MAX_WAITING
    for result in results:
        assert (len(result.token_ids), len(result.logprobs), len(result.rows)) == (40, 40, rows_here(59))


def test_long_prompt_has_all_its_rows(fallback: RunningEngine) -> None:
    """The engine accepts a prompt of 5,000 tokens, and every position has its row."""
    result = fallback.generate(
        GenerateRequest(prompt_token_ids=prompt(5000, seed=41), sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    )[0]

    assert fallback.engine.capabilities.max_model_len == 16_384
    assert len(result.rows) == rows_here(5001)


def test_an_aborted_request_has_the_rows_of_its_generated_tokens(fallback: RunningEngine) -> None:
    """An aborted request ends once, with finish reason ABORT and the rows of the generated tokens."""

    async def abort_after_some() -> Result:
        key = await fallback.add(
            GenerateRequest(
                prompt_token_ids=prompt(20, seed=42), sampling=SamplingParams(max_tokens=5000, ignore_eos=True)
            )
        )
        result = Result()
        while not result.steps or result.last.finish_reason is None:
            result.steps.extend(await fallback.next())
            if len(result.steps) == 3:
                await fallback.engine.abort([key, "unknown"])
        return result

    result = fallback.call(abort_after_some())

    assert result.last.finish_reason is FinishReason.ABORT
    assert 3 <= len(result.token_ids) < 5000
    assert len(result.rows) == rows_here(20 + len(result.token_ids) - 1)


def test_a_failure_ends_only_its_own_request(fallback: RunningEngine) -> None:
    """NaN ends only its own request, and a rejected parameter is named before any request is submitted."""
    impossible = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5, 5]], temperature=0.0)
    failed, fine = fallback.generate(
        GenerateRequest(prompt_token_ids=[1, 2], sampling=impossible),
        GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=3, ignore_eos=True)),
    )

    assert failed.last.finish_reason is FinishReason.ERROR
    assert len(fine.token_ids) == 3
    with pytest.raises(InvalidRequest) as caught:
        fallback.generate(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(stop_token_ids=[999])))
    assert caught.value.field == "sampling.stop_token_ids"
