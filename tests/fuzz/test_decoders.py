"""For any bytes, a decoder returns a value or raises its documented error, in memory proportional to the bytes."""

import functools
import math
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.manifest import decode_manifest
from rollbus.schemas.messages import command_id_of, decode_frame_header, decode_request, decode_request_message
from rollbus.schemas.request import request_id_of
from tests.fuzz.mutations import harmed
from tests.golden.generate import ROOT
from tests.schemas.test_codec import MESSAGES, Decode
from tests.schemas.test_hostile_control import manifest

pytestmark = pytest.mark.slow

BYTES_PER_BYTE = 128
"""Maximum memory for each input byte: an empty map of one byte becomes an object of 64 bytes and a reference."""
SPARE_BYTES = 256 * 1024
"""Memory for errors, their texts and objects that are created once."""
DECODERS: dict[str, Decode] = {
    **{name: decode for name, (decode, *_) in MESSAGES.items()},
    "request": decode_request,
    "request_message": decode_request_message,
    "request_id": request_id_of,
    "frame_header": decode_frame_header,
    "command_id": command_id_of,
    "manifest": decode_manifest,
}
GOLDEN = {
    **{path.name: path.read_bytes() for path in sorted(ROOT.iterdir()) if path.is_file() and ".view" not in path.name},
    **{
        f"{path.stem} without its message": bytes(decode_request_message(path.read_bytes()).request)
        for path in sorted(ROOT.glob("request_*.msgpack"))
    },
    "manifest.json": msgspec.json.encode(manifest()),
}
"""Encoded messages of all types, by file. The golden messages have values in all fields."""
every_decoder = pytest.mark.parametrize("name", DECODERS)


def is_refused(decode: Decode, data: bytes) -> bool:
    """Decode, and return True if a documented error occurs."""
    try:
        decode(data)
    except (RemoteProtocolError, InvalidRequest) as exc:
        assert str(exc)
        return True
    return False


@functools.cache
def own_messages(name: str) -> dict[str, bytes]:
    """Return the messages that a decoder accepts."""
    return {file: data for file, data in GOLDEN.items() if not is_refused(DECODERS[name], data)}


def check(decode: Decode, data: bytes) -> None:
    """Decode, and check that only documented errors occur and that memory stays within the limit."""
    # Trace only here: Hypothesis creates a million further objects while it draws examples.
    tracemalloc.start(1)
    try:
        is_refused(decode, data)
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert taken < SPARE_BYTES + BYTES_PER_BYTE * len(data), f"{len(data)} bytes took {taken}"


@pytest.mark.proves("P11")
@every_decoder
@given(data=st.binary(max_size=400))
@example(data=b"\xdc\xff\xff" + b"\x80" * 65_535)
@example(data=b"\x81\xa1a\xdd\x00\x01\x00\x00" + b"\x90" * 65_536)
@example(data=b"[" * 200_000)
@example(data=b'{"v":' + b"9" * 100_000)
def test_arbitrary_bytes_cause_a_value_or_a_documented_error(name: str, data: bytes) -> None:
    """Arbitrary bytes cause a value or a documented error."""
    check(DECODERS[name], data)


@pytest.mark.proves("P11")
@every_decoder
@given(data=st.data())
def test_damaged_messages_cause_a_value_or_a_documented_error(name: str, data: st.DataObject) -> None:
    """Damaged messages cause a value or an error.

    Bits are flipped, numbers changed, lengths huge, and parts missing or duplicate.
    """
    check(DECODERS[name], data.draw(harmed(st.sampled_from([*own_messages(name).values()]))))


ANY_VALUE: list[Any] = [
    *(None, True, 0, -1, 1.5, -math.inf, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), "", "x", "\u0000", b"", b"\xff" * 8),
    *([], [None], [[1]], [{}] * 3, {}, {"": ""}, {"x": {"x": []}}, {5: 6}, datetime(1970, 1, 2, tzinfo=UTC)),
]


def variants(value: Any) -> Iterator[Any]:
    """Yield copies of a decoded message, each with another value in one place."""
    yield from ANY_VALUE
    places: Any = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, inner in places:
        for other in variants(inner):
            changed = value.copy()
            changed[key] = other
            yield changed


@every_decoder
def test_a_message_of_another_type_causes_a_value_or_an_error(name: str) -> None:
    """A message of another type causes an error, or decodes as far as both types agree."""
    for data in GOLDEN.values():
        check(DECODERS[name], data)


@every_decoder
def test_any_value_in_any_place_causes_a_value_or_an_error(name: str) -> None:
    """Any value in any place of a message causes an error, or is a value of that place."""
    for file, data in own_messages(name).items():
        codec: Any = msgspec.json if file.endswith(".json") else msgspec.msgpack
        for changed in variants(codec.decode(data)):
            is_refused(DECODERS[name], codec.encode(changed))
