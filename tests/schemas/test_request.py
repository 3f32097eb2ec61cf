"""A request: its fields, its ids, and how it is split into samples."""

import collections
import enum
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas import limits
from rollbus.schemas.checks import REQUEST_ID_PATTERN
from rollbus.schemas.errors import (
    ERRORS,
    ErrorCode,
    InvalidRequest,
    NoWorkers,
    RequestError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
    request_error,
)
from rollbus.schemas.messages import decode_request, encode
from rollbus.schemas.presence import SamplingLimits
from rollbus.schemas.request import GenerateRequest, check_given_id, expand_children, lane_of, wire_id
from rollbus.schemas.request_fields import check_fits, check_sampling, request_from_json
from rollbus.schemas.sampling import SamplingParams
from tests.schemas import strategies as wire
from tests.support.fleet import capabilities


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


# The values that a request's fields accept, their stored form, and the differences in JSON.


class Color(enum.IntEnum):
    """An integer of another type."""

    RED = 3


def test_numpy_scalars_and_arrays_become_python_values_and_i4_arrays() -> None:
    """Values of numpy types become Python values. Arrays of any integer type and byte order become `<i4`."""
    make: Any = SamplingParams
    params = make(
        max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.uint8(7), seed=Color.RED,
        ignore_eos=np.True_, stop_token_ids=np.array([1, 2], "u2"), logit_bias={np.int32(4): np.float64(1)},
        allowed_token_ids=(np.int8(1), Color.RED), bad_words_token_ids=[np.array([9])], extra={"a": np.int16(3)},
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=5, temperature=0.5, top_k=7, seed=3, ignore_eos=True, stop_token_ids=(1, 2), logit_bias={4: 1.0},
        allowed_token_ids=(1, 3), bad_words_token_ids=((9,),), extra={"a": 3},
    )  # fmt: skip
    for name in SamplingParams.__struct_fields__:
        assert type(getattr(params, name)) in (int, float, bool, tuple, dict, type(None))
    prompts: list[Any] = [
        (1, 2, 3), range(1, 4), collections.deque([1, 2, 3]), collections.UserList([1, 2, 3]),
        np.array([1, 2, 3], ">i8"), np.array([1, 2, 3], "u8"), np.arange(6)[1:4], np.array([3, 2, 1])[::-1],
        [np.int32(1), 2, np.uint64(3)],
    ]  # fmt: skip
    for prompt in prompts:
        ids = np.asarray(GenerateRequest(prompt_token_ids=prompt).prompt_token_ids)
        assert ids.tolist() == [1, 2, 3]
        assert ids.dtype == np.dtype("<i4")
        assert ids.flags.c_contiguous
    named = GenerateRequest(prompt_token_ids=[1], model=np.str_("m"), request_id=np.str_("r"))
    assert (type(named.model), type(named.request_id)) == (str, str)


def test_later_changes_of_the_callers_objects_do_not_change_a_request() -> None:
    """Later changes of the caller's array, list or dict do not change a request. A read-only i4 array is shared."""
    prompt, extra, words = np.array([1, 2], "<i4"), {"a": [1]}, [[1]]
    params = SamplingParams(extra=extra, bad_words_token_ids=words)
    request = GenerateRequest(prompt_token_ids=prompt, sampling=params)
    prompt[0], words[0][0] = 9, 9
    extra["a"].append(2)

    assert np.asarray(request.prompt_token_ids).tolist() == [1, 2]
    assert (params.extra, params.bad_words_token_ids) == ({"a": [1]}, ((1,),))
    shared = GenerateRequest(prompt_token_ids=request.prompt_token_ids)
    assert shared.prompt_token_ids is request.prompt_token_ids


class Tensor:
    """An object that behaves like a tensor on another device."""

    def __array__(self, *args: object, **kwargs: object) -> Any:
        raise TypeError("can't convert a device tensor to numpy")

    def __repr__(self) -> str:
        return "Tensor([1, 2, 3])"


def test_the_error_for_a_wrong_object_names_only_its_type() -> None:
    """The error for an object that cannot be a prompt has only its type, because its repr could show the prompt."""
    with pytest.raises(
        InvalidRequest, match="prompt_token_ids is a Tensor and cannot become an array; allowed: a flat list"
    ):
        GenerateRequest(prompt_token_ids=Tensor())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="priority is a Tensor, not an integer"):
        GenerateRequest(prompt_token_ids=[1], priority=Tensor())  # type: ignore[arg-type]


def test_json_refuses_unknown_fields_by_name() -> None:
    """The error for an unknown field in a JSONL line lists the known fields. In msgpack the field is ignored."""
    known = ", ".join(GenerateRequest.__struct_fields__)
    of_sampling = ", ".join(SamplingParams.__struct_fields__)
    cases: list[tuple[Any, str, str, str]] = [
        ({"prompt_token_ids": [1], "modle": "m"}, "modle", " (did you mean model?)", known),
        ({"prompt_token_ids": [1], 5: "m"}, "5", "", known),
        ({"prompt_token_ids": [1], "max_tokens": 5}, "max_tokens", " (it is a field of SamplingParams)", known),
        (
            {"prompt_token_ids": [1], "sampling": {"max_new_tokens": 5}},
            "sampling.max_new_tokens",
            " (use max_tokens)",
            of_sampling,
        ),
    ]
    for fields, field, advice, allowed in cases:
        with pytest.raises(InvalidRequest) as caught:
            request_from_json(fields)
        error = caught.value
        assert (error.field, error.problem, error.allowed) == (field, f"is unknown{advice}", allowed)
    no_maps: list[Any] = [[], "text", None, 5]
    for value in no_maps:
        with pytest.raises(InvalidRequest, match=r"request is .*; allowed: a map of its fields"):
            request_from_json(value)
    with pytest.raises(InvalidRequest, match="prompt_token_ids is missing; allowed: a flat list of token ids"):
        request_from_json({})


def test_digits_in_the_json_keys_of_logit_bias_are_token_ids() -> None:
    """JSON has only string keys, so digits stand for a token id there."""
    fields = json.loads('{"prompt_token_ids": [1, 2], "sampling": {"logit_bias": {"17": -1}}}')
    assert request_from_json(fields).sampling.logit_bias == {17: -1.0}
    for name in ("-1", "1.0", " 1", "٣", "9" * 11, ""):
        fields["sampling"]["logit_bias"] = {name: 0}
        with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias \(a key\) is '.*', not an integer"):
            request_from_json(fields)


# Checks of a request that depend on the model's limits.


MODEL = capabilities(max_model_len=10, extra=("known",))
SHORT = capabilities(
    sampling_limits=SamplingLimits(
        allowed_token_ids=3, logit_bias=3, min_tokens_stop_ids=2, bad_words=2, bad_words_tokens=4
    )
)


def check(prompt: list[int], **sampling: Any) -> None:
    """Check a request with this prompt and sampling."""
    request = GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
    check_fits(request, MODEL)
    check_sampling(request.sampling, MODEL)


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


# The error codes and their exceptions.


@pytest.mark.proves("P94")
def test_every_error_code_has_a_meaning_a_responsible_party_and_a_retry_value() -> None:
    """Each error code has a meaning, a responsible party, and a value for whether a retry can succeed."""
    assert list(ERRORS) == list(ErrorCode)
    for facts in ERRORS.values():
        assert facts.meaning
        assert facts.fault in {"client", "worker", "fleet", "network"}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_becomes_the_exception_of_its_kind(code: ErrorCode) -> None:
    """The error of a terminal chunk has the exception of its kind: rejected, failed after acceptance, or timed out."""
    error = request_error(code, "text", request_id="r", field="f", problem="is bad", allowed="good")
    special: dict[ErrorCode, type[RequestError]] = {
        ErrorCode.INVALID_REQUEST: InvalidRequest,
        ErrorCode.NO_WORKERS: NoWorkers,
        ErrorCode.TIMEOUT: RequestTimeout,
    }
    expected = special.get(code, RequestFailed if ERRORS[code].admitted else RequestRejected)

    assert type(error) is expected
    assert (error.code, error.request_id, error.retryable) == (code, "r", ERRORS[code].retryable)
    assert isinstance(error, RequestRejected) or ERRORS[code].admitted
    assert str(error).startswith(f"{code}: ")
    assert str(error).endswith("(request r)")


def test_an_invalid_request_without_a_field_is_still_rejected() -> None:
    """A worker may reject a request for a reason that concerns no single field."""
    error = request_error(ErrorCode.INVALID_REQUEST, "too many things at once")

    assert type(error) is RequestRejected
    assert str(error) == "invalid_request: too many things at once"
