"""Strategies that damage encoded messages as a hostile or broken peer would."""

import struct

from hypothesis import strategies as st

HUGE = st.sampled_from([2**31 - 1, 2**31, 2**32 - 1])
EDGES = st.sampled_from(
    [0, 1, -1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**31), -(2**63)]
)
HEADERS = (b"\xc6", b"\xdb", b"\xdd", b"\xdf", b"\xc9")
"""msgpack markers in front of a length of 32 bits: bytes, text, array, map and extension."""


def _integer(value: int) -> bytes:
    if value < 0:
        return b"\xd3" + struct.pack(">q", value)
    return b"\xcf" + struct.pack(">Q", value)


@st.composite
def _harm(draw: st.DrawFn, data: bytes) -> bytes:
    """Replace the bytes between two positions, or insert bytes."""
    start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
    match draw(st.sampled_from(["bit", "byte", "cut", "drop", "twice", "length", "integer", "digits", "insert"])):
        case "bit":
            end = start + 1
            new = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in data[start:end])
        case "byte":
            end, new = start + 1, draw(st.binary(min_size=1, max_size=1))
        case "cut":
            end, new = len(data), b""
        case "drop":
            new = b""
        case "twice":
            new = data[start:end] * 2
        case "length":
            end, new = start + 1, draw(st.sampled_from(HEADERS)) + struct.pack(">I", draw(HUGE))
        case "integer":
            end, new = start + 1, _integer(draw(EDGES))
        case "digits":
            # JSON text in place of a number.
            new = draw(st.sampled_from([b"1e999", b"-1", b"9" * 400, b"[" * 50, b"null"]))
        case _:
            end, new = start, draw(st.binary(max_size=8))
    return data[:start] + new + data[end:]


@st.composite
def harmed(draw: st.DrawFn, encoded: st.SearchStrategy[bytes]) -> bytes:
    """Return a message with up to four changes."""
    data = draw(encoded)
    for _ in range(draw(st.integers(1, 4))):
        data = draw(_harm(data))
    return data
