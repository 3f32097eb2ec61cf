"""Checks of a request that depend on the model's limits."""

from typing import Any

import pytest

from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.presence import SamplingLimits
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.request_fields import check_model_limits, check_sampling
from rollbus.schemas.sampling import SamplingParams
from tests.support.presences import capabilities

MODEL = capabilities(max_model_len=10, extra=("known",))
SHORT = capabilities(
    sampling_limits=SamplingLimits(
        allowed_token_ids=3, logit_bias=3, min_tokens_stop_ids=2, bad_words=2, bad_words_tokens=4
    )
)


def check(prompt: list[int], **sampling: Any) -> None:
    """Check a request with this prompt and sampling."""
    check_model_limits(GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(**sampling)), MODEL)


def test_a_request_at_the_limits_is_allowed() -> None:
    """A request at the limits of context, token ids, logprobs and engine options is allowed."""
    check([99] * 9, max_tokens=1)
    check([0] * 4, max_tokens=6, min_tokens=6, logprobs=5, prompt_logprobs=5, extra={"known": 1})
    check([0], max_tokens=None, stop_token_ids=[99], logit_bias={99: 1.0}, bad_words_token_ids=[[99]])


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([0] * 10, {"max_tokens": 1}, "prompt_token_ids"),
        ([0, 100], {}, "prompt_token_ids[1]"),
        ([0] * 4, {"max_tokens": 7}, "sampling.max_tokens"),
        ([0] * 4, {"max_tokens": None, "min_tokens": 7}, "sampling.min_tokens"),
        ([0], {"logprobs": 6}, "sampling.logprobs"),
        ([0], {"prompt_logprobs": 6}, "sampling.prompt_logprobs"),
        ([0], {"stop_token_ids": [1, 100]}, "sampling.stop_token_ids"),
        ([0], {"allowed_token_ids": [100]}, "sampling.allowed_token_ids"),
        ([0], {"logit_bias": {100: 1.0}}, "sampling.logit_bias"),
        ([0], {"bad_words_token_ids": [[1], [2, 100]]}, "sampling.bad_words_token_ids[1]"),
        ([0], {"extra": {"unknown": 1}}, "sampling.extra.unknown"),
    ],
)
def test_a_request_above_a_limit_is_refused_with_the_name_of_the_field(
    prompt: list[int], sampling: dict[str, Any], field: str
) -> None:
    """A request one above a limit is rejected with the name of the field."""
    with pytest.raises(InvalidRequest) as error:
        check(prompt, **{"max_tokens": 1, **sampling})
    assert error.value.field == field
    assert error.value.allowed


@pytest.mark.parametrize(
    ("within", "above"),
    [
        ({"allowed_token_ids": [1, 2, 3]}, {"allowed_token_ids": [1, 2, 3, 4]}),
        ({"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}}, {"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}}),
        ({"min_tokens": 1, "stop_token_ids": [1, 2, 2]}, {"min_tokens": 1, "stop_token_ids": [1, 2, 3]}),
        ({"stop_token_ids": [1, 2, 3]}, {"stop_token_ids": [1, 2, 3], "min_tokens": 1}),
        ({"bad_words_token_ids": [[1], [2]]}, {"bad_words_token_ids": [[1], [2], [3]]}),
        ({"bad_words_token_ids": [[1, 2, 3, 4]]}, {"bad_words_token_ids": [[1, 2, 3], [4, 5]]}),
    ],
)
def test_lengths_above_the_limits_of_the_sampler_are_refused_by_name(
    within: dict[str, Any], above: dict[str, Any]
) -> None:
    """A parameter that is longer than the engine's sampler can hold is rejected with its name; the limit is allowed."""
    check_sampling(SamplingParams(**within), SHORT)
    with pytest.raises(InvalidRequest, match="a limit of this engine's sampler") as error:
        check_sampling(SamplingParams(**above), SHORT)
    assert error.value.field in {f"sampling.{name}" for name in above}
