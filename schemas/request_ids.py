"""Ids of requests: what callers may write, and the short form that every message carries."""

import base64
import hashlib

import msgspec

from .checks import REQUEST_ID_PATTERN, check_request_id, describe
from .errors import InvalidRequest
from .limits import MAX_GIVEN_ID_CHARS
from .wire_version import MALFORMED

__all__ = ["check_given_id", "request_id_of", "wire_id"]

MAPPED = "x:"
"""Prefix of the wire's form of ids that subjects and chunks cannot carry as they are."""
NUM_HASH_CHARS = 26
"""130 bits: no two ids of a fleet have the same wire form."""


def check_given_id(field: str, value: object) -> str:
    """Accept printable ids of up to 512 characters without a space at either end."""
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= MAX_GIVEN_ID_CHARS
        or not value.isprintable()
        or value != value.strip()
    ):
        raise InvalidRequest(
            field=field,
            problem=f"is {describe(value)}" + (f" of {len(value)} characters" if isinstance(value, str) else ""),
            allowed=f"1 to {MAX_GIVEN_ID_CHARS} printable characters without a space at either end",
        )
    return str.__str__(value)


def wire_id(given: str, scope: str | None = None) -> str:
    """Return the id on the wire of a request with the id `given`.

    An id of up to 128 of A-Z a-z 0-9 _ : - stays as it is. Any other id, an id that begins with `x:`, and an id with a
    scope become `x:` and a hash.
    """
    if scope is None and not given.startswith(MAPPED) and REQUEST_ID_PATTERN.fullmatch(given) is not None:
        return given
    text = given if scope is None else f"{scope}\0{given}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return MAPPED + base64.b32encode(digest)[:NUM_HASH_CHARS].decode()


class _OnlyId(msgspec.Struct):
    request_id: str


_only_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


def request_id_of(raw: bytes | msgspec.Raw) -> str | None:
    """Return the wire's id of an encoded `GenerateRequest`, even if other fields are wrong; None if it is invalid."""
    try:
        return check_request_id("request_id", _only_id_decoder.decode(raw).request_id)
    except (*MALFORMED, InvalidRequest):
        return None
