"""The wire version of a message, which can be decoded even if the rest of the message cannot."""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

__all__ = ["MALFORMED", "WIRE_VERSION", "Form", "other_version", "why_malformed"]

WIRE_VERSION: Final = 1
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All exceptions of decoders for hostile bytes. Invalid UTF-8 raises no `DecodeError`, and deep nesting reaches
Python's own limit."""

Form = Literal["map", "array", "json"]
"""Encoding of a message: a msgpack map, a msgpack array, or JSON."""


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
    """Return the wire version of a message that does not decode.

    None if it is this version or if the version does not decode either.
    """
    try:
        version = _DECODE[form](data).v
    except MALFORMED:
        return None
    return None if version == WIRE_VERSION else version


def why_malformed(error: Exception, data: bytes, form: Form) -> str:
    """Return the decoder's error for a message, or a text about the wire version if the message has another version."""
    version = other_version(data, form)
    return str(error) if version is None else f"wire version {version}; allowed: {WIRE_VERSION}"
