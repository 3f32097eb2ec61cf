"""Properties of a request: its lane, its child requests, and whether it can be resumed exactly."""

import numpy as np
import pytest
from hypothesis import given

from rollbus.schemas import limits
from rollbus.schemas.request import GenerateRequest, expand_children, lane_of
from rollbus.schemas.sampling import SamplingParams
from tests.schemas import strategies as wire


@pytest.mark.proves("P40")
@pytest.mark.parametrize(
    ("priority", "lane"),
    [(-limits.MAX_PRIORITY, "high"), (-1, "high"), (0, "normal"), (1, "low"), (limits.MAX_PRIORITY, "low")],
)
def test_the_lane_follows_the_sign_of_the_priority(priority: int, lane: str) -> None:
    """The sign of the priority selects the lane. A lower priority is more urgent, as in vLLM."""
    assert lane_of(priority) == lane


@pytest.mark.proves("P36")
@given(wire.requests())
def test_child_requests_differ_only_in_their_seed(request: GenerateRequest) -> None:
    """A request for n samples becomes n child requests that share one prompt array. Child i has seed + i."""
    children = expand_children(request)

    assert len(children) == request.sampling.n
    seed = request.sampling.seed
    for i, child in enumerate(children):
        assert child.sampling.n == 1
        assert child.sampling.seed == (None if seed is None else seed + i)
        assert child.prompt_token_ids is request.prompt_token_ids
        for name in request.__struct_fields__:
            if name not in ("sampling", "prompt_token_ids"):
                assert getattr(child, name) == getattr(request, name)
        for name in request.sampling.__struct_fields__:
            if name not in ("n", "seed"):
                assert getattr(child.sampling, name) == getattr(request.sampling, name)


def test_a_request_for_one_sample_is_its_own_child_request() -> None:
    """A request for one sample is its own child request, without a copy."""
    request = GenerateRequest(prompt_token_ids=[1])

    assert expand_children(request) == [request]


@pytest.mark.parametrize(
    ("params", "continuable"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=-0.0), True),
        (SamplingParams(temperature=0, min_tokens=4, max_tokens=9), True),
        (SamplingParams(temperature=0, logit_bias={5: 1.0}, allowed_token_ids=[5, 6]), True),
        (SamplingParams(temperature=0, bad_words_token_ids=[]), True),
        (SamplingParams(temperature=0, extra={}), True),
        (SamplingParams(), True),
        (SamplingParams(seed=5), False),
        (SamplingParams(temperature=1e-9, seed=5), False),
        (SamplingParams(temperature=0, seed=5), True),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(temperature=0, repetition_penalty=1.1), False),
        (SamplingParams(temperature=0, presence_penalty=0.1), False),
        (SamplingParams(temperature=0, frequency_penalty=-0.1), False),
        (SamplingParams(temperature=0, bad_words_token_ids=[[1]]), False),
        (SamplingParams(temperature=0, extra={"a": 1}), False),
    ],
)
def test_only_requests_without_state_besides_their_tokens_can_be_continued(
    params: SamplingParams, continuable: bool
) -> None:
    """Seeded generators, penalties, bad words and engine options depend on more than the tokens so far."""
    assert params.is_continuable is continuable


def test_request_ids_are_drawn_at_random() -> None:
    """A request without an id gets a random valid id."""
    first, second = (GenerateRequest(prompt_token_ids=[1]) for _ in range(2))

    assert first.request_id != second.request_id
    assert GenerateRequest(prompt_token_ids=[1], request_id=first.request_id).request_id == first.request_id


def test_requests_cannot_be_changed() -> None:
    """A request is immutable, so that it stays valid."""
    request = GenerateRequest(prompt_token_ids=[1])
    with pytest.raises(AttributeError):
        request.priority = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(request.prompt_token_ids)[0] = 5
