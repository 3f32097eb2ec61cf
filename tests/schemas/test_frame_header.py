"""The parts of an undecodable frame that can be read: its header and its requests."""

import msgspec
import pytest

from rollbus.schemas.messages import RequestKey, decode_frame_header

GOOD = ["r", 1, 0, 4, 0, b"\1\0\0\0"]
BAD = ["s", 0, 2, 4, 0, b"abc"]


def frame(admitted: object, chunks: object) -> bytes:
    """Return frame 7 of link 3, encoded without validation."""
    return msgspec.msgpack.encode([1, "w", 7, admitted, chunks, 3, "c"])


def test_the_header_of_a_frame_with_a_wrong_chunk_lists_all_requests() -> None:
    """The header has all requests of the frame, and those whose chunks do not decode."""
    header = decode_frame_header(frame([["t"]], [GOOD, BAD]))

    assert header is not None
    assert (header.incarnation, header.number, header.link, header.client_incarnation) == ("w", 7, 3, "c")
    assert header.keys == {RequestKey("r", 1, 0), RequestKey("s", 0, 2), RequestKey("t")}
    assert header.bad_keys == {RequestKey("s", 0, 2)}


@pytest.mark.parametrize("content", [([5], [BAD]), ([], "no list"), ([], [BAD, ["r"]]), ([], [GOOD, 5])])
def test_the_header_of_a_frame_with_an_unreadable_request_lists_no_requests(content: tuple[object, object]) -> None:
    """If a request of the frame is unreadable, the header has no requests. The readable part may be incomplete."""
    header = decode_frame_header(frame(*content))

    assert header is not None
    assert (header.number, header.keys, header.bad_keys) == (7, frozenset(), frozenset())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"+ACK", frame([], [BAD])[:-5], msgspec.msgpack.encode([2, "w", 7, [], []])]
)
def test_truncated_and_other_messages_have_no_header(data: bytes) -> None:
    """A truncated frame, a frame of another wire version and an answer of JetStream have no header."""
    assert decode_frame_header(data) is None
