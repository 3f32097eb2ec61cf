"""The values that a request's fields accept, their stored form, and the differences in JSON."""

import collections
import enum
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.request_fields import request_from_json
from rollbus.schemas.sampling import SamplingParams
from tests.support.patience import SOON_S


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


def test_checks_hold_without_assertions() -> None:
    """The checks are the same under `python -O`, because none of them is an assertion."""
    program = """
import msgspec
from rollbus.schemas.chunk import RoutedExperts
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import decode_frame, decode_request
from rollbus.schemas.request_fields import request_from_json
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
if __debug__:
    raise SystemExit("assertions are on")
bad = {"prompt_token_ids": [1], "sampling": {"top_p": 0}}
for make in (
    lambda: SamplingParams(temperature=float("nan")),
    lambda: GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(n=0)),
    lambda: decode_request(msgspec.msgpack.encode(bad)),
    lambda: request_from_json(bad),
    lambda: decode_frame(msgspec.msgpack.encode([1, "i", 0, [], [["r", 0, 0, 0, 0, b"abc"]]])),
    lambda: RoutedExperts(0, (1, 1, 1), "u1", b""),
):
    try:
        make()
    except (InvalidRequest, RemoteProtocolError, ValueError) as exc:
        print(exc)
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True, timeout=SOON_S
    )

    assert result.stdout.splitlines() == [
        "invalid_request: sampling.temperature is nan; allowed: a number from 0 to 2",
        "invalid_request: sampling.n is 0; allowed: an integer from 1 to 256",
        "invalid_request: sampling.top_p is 0.0; allowed: a number above 0 up to 1",
        "invalid_request: sampling.top_p is 0; allowed: a number above 0 up to 1",
        "frame: token ids of 3 bytes are not an <i4 array of up to 4194304 ids - at `$[4][0]`",
        "routed experts of shape (1, 1, 1) and dtype u1 take 1 bytes, not 0",
    ]
