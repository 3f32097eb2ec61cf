"""Whatever bytes come, a decoder gives a value or its documented error, and takes memory in proportion to them."""

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
"""The most that a byte may become: an empty map, of one byte, is an object of 64 and a place in another."""
SPARE_BYTES = 256 * 1024
"""For errors and their texts, and what is made once."""
every_decoder = pytest.mark.parametrize("name", DECODERS)


def check(decode: Callable[[bytes], object], data: bytes) -> None:
    """Decode; only documented errors leave the decoder, and no more memory is taken than such bytes may need."""
    # Not for the whole module: what draws examples makes a million objects more.
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
def test_any_bytes(name: str, data: bytes) -> None:
    """Bytes that nobody encoded."""
    check(DECODERS[name][0], data)


@pytest.mark.proves("P11")
@every_decoder
@given(data=st.data())
def test_harmed_messages(name: str, data: st.DataObject) -> None:
    """Messages with flipped bits, changed numbers, huge lengths, parts missing or doubled."""
    decode, encoded = DECODERS[name]
    check(decode, data.draw(harmed(encoded)))


@every_decoder
@settings(max_examples=20)
@given(data=st.data())
def test_messages_in_each_others_place(name: str, data: st.DataObject) -> None:
    """A whole message of another kind is an error, or is understood as far as it is the same."""
    other = data.draw(st.sampled_from(sorted(DECODERS)))
    check(DECODERS[name][0], data.draw(DECODERS[other][1]))
