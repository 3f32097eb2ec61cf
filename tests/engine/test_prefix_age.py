"""What the real engine says of the age of its oldest prefix: a prefix that was used before is gone from its cache."""

import time

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt
from tests.support.vllm_engine import RunningEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT_LEN = 300
FIRST = 1000
"""The seed of the first prompt; the others follow."""
MAX_OTHERS = 12
"""Prompts of nine whole blocks, of which the cache has 63: seven of them fill it."""


def request_of(seed: int) -> GenerateRequest:
    """A prompt of its own."""
    return GenerateRequest(
        prompt_token_ids=prompt(PROMPT_LEN, seed=seed),
        sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        cache_salt="prefix age",
    )


def test_a_prefix_older_than_announced_is_gone_and_a_young_one_is_there(moe: RunningEngine) -> None:
    """The first prompt is older after some others, and the last one is much younger."""
    moe.generate(request_of(FIRST))
    used_at = time.monotonic()
    for seed in range(FIRST + 1, FIRST + MAX_OTHERS):
        moe.generate(request_of(seed))
        # Before the age is asked for: what seems older than it is older.
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
