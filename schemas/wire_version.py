"""Which version of the wire a message is of, told also where the rest of it cannot be read."""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

__all__ = ["MALFORMED", "WIRE_VERSION", "Form", "other_version", "why_malformed"]

WIRE_VERSION: Final = 1
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoders raise on hostile bytes: bad UTF-8 is no `DecodeError`, and deep nesting hits Python's own limit."""

Form = Literal["map", "array", "json"]
"""How a message is written: a msgpack map, a msgpack array, JSON."""


class _OfMap(msgspec.Struct):
    v: int = WIRE_VERSION


class _OfArray(msgspec.Struct, array_like=True):
    v: int


_DECODE: Final[dict[Form, Callable[[bytes], _OfMap | _OfArray]]] = {
    "map": msgspec.msgpack.Decoder(_OfMap).decode,
    "array": msgspec.msgpack.Decoder(_OfArray).decode,
    "json": msgspec.json.Decoder(_OfMap).decode,
}


def other_version(data: bytes, form: Form) -> int | None:
    """The wire version of a message that does not decode; None when it is ours, or cannot be told."""
    try:
        version = _DECODE[form](data).v
    except MALFORMED:
        return None
    return None if version == WIRE_VERSION else version


def why_malformed(error: Exception, data: bytes, form: Form) -> str:
    """What to say of a message of which a decoder said `error`: that it is of another version, where it is."""
    version = other_version(data, form)
    return str(error) if version is None else f"wire version {version}; allowed: {WIRE_VERSION}"
