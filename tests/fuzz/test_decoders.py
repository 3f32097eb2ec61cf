"""For any bytes, a decoder returns a value or raises its documented error, in memory proportional to the bytes."""

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from tests.fuzz.mutations import harmed
from tests.schemas.test_codec import DECODERS

pytestmark = pytest.mark.slow

BYTES_PER_BYTE = 128
"""Maximum memory for each input byte: an empty map of one byte becomes an object of 64 bytes and a reference."""
SPARE_BYTES = 256 * 1024
"""Memory for errors, their texts and objects that are created once."""
every_decoder = pytest.mark.parametrize("name", DECODERS)


def check(decode: Callable[[bytes], object], data: bytes) -> None:
    """Decode, and check that only documented errors occur and that memory stays within the limit."""
    # Trace only here: Hypothesis creates a million further objects while it draws examples.
    tracemalloc.start(1)
    try:
        decode(data)
    except (RemoteProtocolError, InvalidRequest) as exc:
        assert str(exc)
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
    check(DECODERS[name][0], data)


@pytest.mark.proves("P11")
@every_decoder
@given(data=st.data())
def test_damaged_messages_cause_a_value_or_a_documented_error(name: str, data: st.DataObject) -> None:
    """Damaged messages cause a value or an error.

    Bits are flipped, numbers changed, lengths huge, and parts missing or duplicate.
    """
    decode, encoded = DECODERS[name]
    check(decode, data.draw(harmed(encoded)))


@every_decoder
@settings(max_examples=20)
@given(data=st.data())
def test_a_message_of_another_type_causes_a_value_or_an_error(name: str, data: st.DataObject) -> None:
    """A message of another type causes an error, or decodes as far as both types agree."""
    other = data.draw(st.sampled_from(sorted(DECODERS)))
    check(DECODERS[name][0], data.draw(DECODERS[other][1]))
