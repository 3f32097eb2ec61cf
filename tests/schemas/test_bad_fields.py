"""Every bad field of a request gives an `InvalidRequest` that names the field, the problem and what is allowed.

One table serves all ways in: construction, msgpack and JSON.
"""

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


def name_of(bad: object) -> str:
    """A short name for a parametrized case."""
    return f"{bad.field}={bad.problem[:20]}" if isinstance(bad, Bad) else str(bad)


def fields_with(bad: Bad) -> dict[str, Any]:
    """Plain fields of a request of three prompt tokens, right but for one value."""
    fields: dict[str, Any] = {"prompt_token_ids": [1, 2, 3]}
    if bad.field.startswith("sampling.") and bad.name != "sampling":
        return {**fields, "sampling": {bad.name: bad.value}}
    return {**fields, bad.name: bad.value}


def construct(fields: dict[str, Any]) -> GenerateRequest:
    """Build a request as a caller does, nested maps as `SamplingParams`."""
    if isinstance(fields.get("sampling"), dict):
        fields["sampling"] = SamplingParams(**fields["sampling"])
    return GenerateRequest(**fields)


def check_error(caught: InvalidRequest, bad: Bad) -> None:
    """The error names field, problem and what is allowed, and its text is short enough to read."""
    assert caught.field == bad.field
    assert bad.problem in caught.problem
    assert caught.allowed == bad.allowed
    assert str(caught) == f"invalid_request: {caught.field} {caught.problem}; allowed: {caught.allowed}"
    assert caught.code is ErrorCode.INVALID_REQUEST
    assert not caught.retryable
    assert len(str(caught)) < 400


@pytest.mark.proves("P27")
@pytest.mark.parametrize("bad", ALL, ids=name_of)
def test_bad_fields_are_named_on_construction(bad: Bad) -> None:
    """A caller who builds a request with a bad value learns at once which, why and what is allowed."""
    with pytest.raises(InvalidRequest) as caught:
        construct(fields_with(bad))

    check_error(caught.value, bad)


@pytest.mark.parametrize("bad", ALL, ids=name_of)
def test_bad_fields_are_named_in_json(bad: Bad) -> None:
    """A bad value in a JSONL line gives the same error as on construction."""
    with pytest.raises(InvalidRequest) as caught:
        request_from_json(fields_with(bad))

    check_error(caught.value, bad)


def on_the_wire() -> list[Bad]:
    """The cases whose values msgpack can hold as they are."""
    cases = []
    for bad in ALL:
        try:
            same = msgspec.msgpack.decode(msgspec.msgpack.encode(bad.value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
        # Bytes are how prompts travel, so they are not wrong there.
        if repr(same) == repr(bad.value) and not (bad.name == "prompt_token_ids" and isinstance(same, bytes)):
            cases.append(bad)
    return cases


@pytest.mark.proves("P27")
@pytest.mark.parametrize("bad", on_the_wire(), ids=name_of)
def test_bad_fields_are_named_on_the_wire(bad: Bad) -> None:
    """A bad value that arrives as msgpack gives the same error as on construction."""
    with pytest.raises(InvalidRequest) as caught:
        decode_request(msgspec.msgpack.encode(fields_with(bad)))

    check_error(caught.value, bad)


def test_the_table_covers_every_field() -> None:
    """Every field of a request and of its sampling has bad values in the table, on the wire too."""
    for cases in (ALL, on_the_wire()):
        covered = {bad.field.partition("[")[0].partition(" ")[0] for bad in cases}
        for name in SamplingParams.__struct_fields__:
            assert f"sampling.{name}" in covered
        for name in GenerateRequest.__struct_fields__:
            assert name in covered


@pytest.mark.parametrize("kind", [SamplingParams, GenerateRequest], ids=lambda kind: kind.__name__)
def test_none_is_accepted_exactly_where_it_has_a_meaning(kind: type[Any]) -> None:
    """None stands for `not asked for` in the fields that say so and is refused by name in the others."""
    base = {"prompt_token_ids": [1]} if kind is GenerateRequest else {}
    for name in kind.__struct_fields__:
        if name in NULLABLE:
            assert getattr(kind(**{**base, name: None}), name) is None
        else:
            with pytest.raises(InvalidRequest, match=f"{name} is None"):
                kind(**{**base, name: None})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "prompt_token_ids"])
def test_lists_that_are_too_long_are_refused_by_their_length(name: str) -> None:
    """The length of a list is checked before its entries are looked at."""
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


def test_fields_that_bind_each_other_are_checked_together() -> None:
    """min_tokens may not pass max_tokens, nor seed + n - 1 the largest seed, numpy's wrap-around included."""
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
