"""Each invalid field of a request raises an `InvalidRequest` with the field, the problem and the allowed values.

One table covers all three inputs: construction, msgpack and JSON.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from rollbus.schemas import limits
from rollbus.schemas.errors import ErrorCode, InvalidRequest
from rollbus.schemas.messages import decode_request
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.request_fields import request_from_json
from rollbus.schemas.sampling import SamplingParams
from tests.schemas.bad_fields import ALL, NULLABLE, Bad


def fields_with(bad: Bad) -> dict[str, Any]:
    """Return plain fields of a request with three prompt tokens, valid except for one value."""
    fields: dict[str, Any] = {"prompt_token_ids": [1, 2, 3]}
    if bad.field.startswith("sampling.") and bad.name != "sampling":
        return {**fields, "sampling": {bad.name: bad.value}}
    return {**fields, bad.name: bad.value}


def construct(fields: dict[str, Any]) -> GenerateRequest:
    """Build a request as a caller does, with nested maps as `SamplingParams`."""
    if isinstance(fields.get("sampling"), dict):
        fields["sampling"] = SamplingParams(**fields["sampling"])
    return GenerateRequest(**fields)


def check_error(caught: InvalidRequest, bad: Bad) -> None:
    """Assert that the error has field, problem and allowed values, and that its text is short."""
    assert caught.field == bad.field
    assert bad.problem in caught.problem
    assert caught.allowed == bad.allowed
    assert str(caught) == f"invalid_request: {caught.field} {caught.problem}; allowed: {caught.allowed}"
    assert caught.code is ErrorCode.INVALID_REQUEST
    assert not caught.retryable
    assert len(str(caught)) < 400


def on_the_wire() -> list[Bad]:
    """Return the cases whose values msgpack can encode unchanged."""
    cases = []
    for bad in ALL:
        try:
            same = msgspec.msgpack.decode(msgspec.msgpack.encode(bad.value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
        # A prompt is encoded as bytes on the wire, so bytes are valid there.
        if repr(same) == repr(bad.value) and not (bad.name == "prompt_token_ids" and isinstance(same, bytes)):
            cases.append(bad)
    return cases


ON_THE_WIRE = on_the_wire()


@pytest.mark.proves("P27")
@pytest.mark.parametrize("name", sorted({bad.name for bad in ALL}))
def test_bad_fields_are_named(name: str) -> None:
    """An invalid value raises the same error with field, problem and allowed values, by each way into a request.

    The ways are construction, a JSONL line and, if msgpack can carry the value, a message.
    """
    on_the_wire = {id(bad) for bad in ON_THE_WIRE}
    for bad in (bad for bad in ALL if bad.name == name):
        ways: list[Callable[[dict[str, Any]], object]] = [construct, request_from_json]
        if id(bad) in on_the_wire:
            ways.append(lambda fields: decode_request(msgspec.msgpack.encode(fields)))
        for way in ways:
            with pytest.raises(InvalidRequest) as caught:
                way(fields_with(bad))
            check_error(caught.value, bad)


def test_the_table_covers_every_field() -> None:
    """The table has invalid values for each field of a request and its sampling, also in msgpack."""
    for cases in (ALL, ON_THE_WIRE):
        covered = {bad.field.partition("[")[0].partition(" ")[0] for bad in cases}
        for name in SamplingParams.__struct_fields__:
            assert f"sampling.{name}" in covered
        for name in GenerateRequest.__struct_fields__:
            assert name in covered


@pytest.mark.parametrize("kind", [SamplingParams, GenerateRequest], ids=lambda kind: kind.__name__)
def test_none_is_valid_only_in_fields_that_document_a_meaning(kind: type[Any]) -> None:
    """None is valid only in fields that document it as not requested.

    Other fields reject None, and the error names the field.
    """
    base = {"prompt_token_ids": [1]} if kind is GenerateRequest else {}
    for name in kind.__struct_fields__:
        if name in NULLABLE:
            assert getattr(kind(**{**base, name: None}), name) is None
        else:
            with pytest.raises(InvalidRequest, match=f"{name} is None"):
                kind(**{**base, name: None})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "prompt_token_ids"])
def test_lists_that_are_too_long_are_refused_by_their_length(name: str) -> None:
    """The length of a list is validated before its entries."""
    high = {
        "stop_token_ids": limits.MAX_STOP_TOKEN_IDS,
        "allowed_token_ids": limits.MAX_ALLOWED_TOKEN_IDS,
        "prompt_token_ids": limits.MAX_PROMPT_TOKENS,
    }[name]
    make: Any = GenerateRequest if name == "prompt_token_ids" else SamplingParams
    for value in ([-1] * (high + 1), np.zeros(high + 1, "i4")):
        with pytest.raises(
            InvalidRequest, match=rf"{name} has {high + 1} entries; allowed: a flat list of . to {high} "
        ):
            make(**{name: value})
    assert len(getattr(make(**{name: np.zeros(high, "i4")}), name)) == high


def test_a_token_is_left_to_sample() -> None:
    """A list of allowed tokens needs one that neither bad words nor `min_tokens` forbid."""
    empty: list[dict[str, Any]] = [
        {"bad_words_token_ids": [[5], [6], [7]]},
        {"stop_token_ids": [5, 6], "min_tokens": 1},
        {"bad_words_token_ids": [[5]], "stop_token_ids": [6], "min_tokens": 1},
    ]
    for fields in empty:
        with pytest.raises(InvalidRequest, match=r"sampling\.allowed_token_ids allows only tokens that .* forbid"):
            SamplingParams(allowed_token_ids=[5, 6], **fields)
        assert SamplingParams(allowed_token_ids=[5, 6, 8], **fields).allowed_token_ids == (5, 6, 8)
        assert SamplingParams(**fields).allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], bad_words_token_ids=[[5, 5]]).min_tokens == 0


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    """`min_tokens` cannot exceed `max_tokens`.

    The last seed, seed + n - 1, cannot exceed the largest seed, and numpy integers cannot overflow in this check.
    """
    with pytest.raises(InvalidRequest, match=r"sampling\.min_tokens is 6; allowed: 0 to max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=6, max_tokens=None).min_tokens == 6
    pairs: list[Any] = [(limits.MAX_SEED, 2), (np.int64(limits.MAX_SEED), np.int64(2))]
    for seed, n in pairs:
        with pytest.raises(InvalidRequest, match=rf"sampling\.seed is .* n=2; allowed: .* to {limits.MAX_SEED - 1}"):
            SamplingParams(seed=seed, n=n)
    assert SamplingParams(seed=limits.MAX_SEED - 1, n=2).n == 2
    with pytest.raises(InvalidRequest, match=r"routed_experts_prompt_start is 3; allowed: an integer from 0 to 2"):
        GenerateRequest(prompt_token_ids=[1, 2], routed_experts_prompt_start=3)
