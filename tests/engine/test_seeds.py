"""Seeded requests give the same tokens however their prompts are split over the engine's steps."""

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt
from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm

LENGTHS = (1, 2, 31, 32, 33, 64, 100, 255, 256, 257, 300, 400, 480)
"""Prompt lengths around the sizes of a block and of a step, and of up to two steps."""


def seeded(length: int, seed: int, max_tokens: int = 16, **sampling: float) -> GenerateRequest:
    """Return a seeded request with a unique prompt."""
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerateRequest(prompt_token_ids=prompt(length, seed=1000 + seed), sampling=params)


def companions(lengths: Sequence[int]) -> list[GenerateRequest]:
    """Return requests without a seed, alternately random and greedy."""
    return [
        GenerateRequest(
            prompt_token_ids=prompt(length, seed=2000 + number),
            sampling=SamplingParams(max_tokens=12, temperature=float(number % 2), ignore_eos=True),
        )
        for number, length in enumerate(lengths)
    ]


def alone(engine: RunningEngine, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    """Return the tokens of each request alone, computed without a shared prefix cache."""
    return [engine.generate(replace(request, cache_salt="alone"))[0].token_ids for request in requests]


def test_seeded_requests_give_the_same_tokens_in_steps_smaller_than_the_prompt(moe: RunningEngine) -> None:
    """With steps smaller than prompts, each seeded request gets the same tokens among others as alone."""
    requests = [seeded(length, seed) for seed, length in enumerate(LENGTHS)]
    requests += [seeded(length, 50 + length, top_p=0.9, top_k=40) for length in (33, 257, 480)]
    others = companions((450, 3, 260, 90, 130, 470))
    mixed = [request for pair in zip(requests, (others * 3)[: len(requests)], strict=True) for request in pair]

    together = moe.generate(*mixed)

    assert all(result.last.finish_reason is FinishReason.LENGTH for result in together)
    assert [result.token_ids for result in together[::2]] == alone(moe, requests)


def test_seeded_requests_give_the_same_tokens_if_a_long_step_splits_prompts(reloaded: RunningEngine) -> None:
    """If one step of 256 tokens cannot hold all prompts, the prompts that it splits get the same tokens as alone."""
    lengths = np.random.default_rng(7).integers(200, 1200, 24)
    requests = [seeded(int(length), 100 + number) for number, length in enumerate(lengths)]

    together = reloaded.generate(*requests, *companions((900, 40, 700, 300)))

    assert [result.token_ids for result in together[: len(requests)]] == alone(reloaded, requests)


def test_a_preempted_request_continues_with_the_next_numbers_of_its_seed(
    moe: RunningEngine, preemptions: list[str]
) -> None:
    """A request that lost its KV cache continues with the next random numbers of its seed."""
    requests = [seeded(90, 200 + number, max_tokens=200) for number in range(12)]

    together = moe.generate(*requests)

    assert len(set(preemptions)) >= 3
    # The last requests are the first to be preempted.
    assert [result.token_ids for result in together[-5:]] == alone(moe, requests[-5:])
