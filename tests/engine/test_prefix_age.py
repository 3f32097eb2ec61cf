"""The age of the oldest prefix that the real engine reports: an older prefix is no longer in its cache."""

import time

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
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
