"""Ids of requests: any printable string for callers, a short form on the wire."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas.checks import REQUEST_ID_PATTERN
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.messages import decode_request, encode
from rollbus.schemas.request import GenerateRequest, check_given_id, wire_id


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
