"""A request: its fields, its ids, and how it is split into samples."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas import limits
from rollbus.schemas.checks import REQUEST_ID_PATTERN
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.messages import decode_request, encode
from rollbus.schemas.request import GenerateRequest, check_given_id, expand_children, lane_of, wire_id
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


@pytest.mark.parametrize("name", ["r", "a:b_C-9", "r" * 128])
def test_an_id_of_the_wire_stays_as_it_is(name: str) -> None:
    """An id that the wire can carry is not mapped."""
    request = GenerateRequest(prompt_token_ids=[1], request_id=name)
    assert wire_id(name) == name
    assert request.on_wire() is request


@given(st.text(min_size=1, max_size=512), st.none() | st.text(min_size=1, max_size=20))
def test_every_other_id_has_a_wire_form_of_its_own(name: str, scope: str | None) -> None:
    """Each id has a valid form on the wire, and no two ids or scopes have the same form."""
    form = wire_id(name, scope)
    assert REQUEST_ID_PATTERN.fullmatch(form)
    assert (form == name) == (scope is None and not name.startswith("x:") and bool(REQUEST_ID_PATTERN.fullmatch(name)))
    assert form not in (wire_id(f"{name}.", scope), wire_id(name, f"{scope}+"))


def test_the_mapping_is_part_of_the_protocol() -> None:
    """Other programs can compute the form: `x:` and 26 characters of the base32 form of the id's SHA-256."""
    assert wire_id("gsm8k/test.1") == "x:34AS6AKL6OYH6NTUPEEHUE6GH3"


@pytest.mark.parametrize("name", ["a/b=c.d", "two words", "naïve-日本-😀", "x:y", "r" * 512, '"quoted"'])
def test_printable_ids_are_kept(name: str) -> None:
    """A caller's id stays as it came, and only the message has the short form."""
    request = GenerateRequest(prompt_token_ids=[1], request_id=name)
    assert request.request_id == name
    assert decode_request(encode(request.on_wire())).request_id == request.wire_id == wire_id(name)


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\u00a0b", "\u202e", "r" * 513, "\ud800", 5])
def test_other_values_are_no_ids(name: object) -> None:
    """An empty, too long or unprintable id, and one with a space at an end, is rejected."""
    with pytest.raises(InvalidRequest, match="1 to 512 printable characters"):
        check_given_id("request_id", name)


@pytest.mark.parametrize("fields", [{"request_id": "a/b"}, {"request_id": "r", "id_scope": "s"}])
def test_the_wire_carries_only_the_short_form(fields: dict[str, Any]) -> None:
    """A message with a caller's id or a scope is rejected: subjects, chunks and logs could not carry it."""
    with pytest.raises(InvalidRequest) as error:
        decode_request(encode(GenerateRequest(prompt_token_ids=[1], **fields)))
    assert error.value.field == list(fields)[-1]
