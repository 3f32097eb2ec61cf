"""Decodes stored documents, and explains the errors of msgspec's decoders: which field is wrong, and what it may be.

The wire version of a message can be decoded even if the rest of the message cannot.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import fields

from .errors import InvalidRequest, RemoteProtocolError

UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
MISSING_FIELD: Final = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
AT_PATH: Final = re.compile(r"(?P<problem>.*?) - at `\$\.(?P<path>[^`]*)`", re.DOTALL)
EXPECTED: Final = re.compile(r"Expected (?P<type>.*?)(, got .*)?", re.DOTALL)
VALUE: Final = re.compile(r"Invalid (enum )?value (?P<value>.*)", re.DOTALL)
FIELD_NAME: Final = re.compile(r"[^.\[\]]+")
MAX_COMPARED_CHARS: Final = 200
"""Longest unknown name that is compared with known names. A name of megabytes would block the event loop for a second.
"""
WIRE_VERSION: Final = 1
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All exceptions of decoders for hostile bytes. Invalid UTF-8 raises no `DecodeError`, and deep nesting reaches
Python's own limit."""
Form = Literal["map", "array", "json"]
"""Encoding of a message: a msgpack map, a msgpack array, or JSON."""
JsonObject = dict[str, Any]
"""A JSON object, or fields by name that become one."""
T = TypeVar("T")


def nearest(name: str, allowed: Iterable[str], similarity: float = 0.6) -> str:
    """Return a "did you mean" question, to follow a problem; an empty string if no name is similar.

    A name longer than `MAX_COMPARED_CHARS` also gives an empty string.

    Args:
        similarity: least similarity of the name in the question, from 0 (any name) to 1 (equal).
    """
    if len(name) > MAX_COMPARED_CHARS:
        return ""
    found = difflib.get_close_matches(name, list(allowed), 3, similarity)
    # For --modle prefer two swapped letters (--model) to one extra letter (--mode).
    best = max(found, key=lambda each: sorted(each) == sorted(name), default=None)
    return "" if best is None else f" (did you mean {best}?)"


def enum_values(kind: object, path: str) -> list[str]:
    """Return the values that a document of type `kind` may have at a path such as `mode` or `modalities[0]`.

    The list is empty for a field that has no fixed values.
    """
    literals = [part for part in _parts(_find_kinds(kind, path)) if get_origin(part) is Literal]
    return [str(value) for part in literals for value in get_args(part)]


def field_names(kind: object, path: str) -> list[str]:
    """Return the names of the fields that an object at this path may have."""
    return [each.encode_name for part in _parts(_find_kinds(kind, path)) if _is_struct(part) for each in fields(part)]


def _find_kinds(kind: object, path: str) -> list[object]:
    kinds = [kind]
    for name in FIELD_NAME.findall(path):
        # The index of a list item needs no step of its own: `_parts` already yields the types of list items.
        found = [
            each.type for part in _parts(kinds) if _is_struct(part) for each in fields(part) if each.encode_name == name
        ]
        kinds = found or kinds
    return kinds


def _parts(kinds: list[object]) -> Iterator[Any]:
    """Yield types and their parts: the members of unions and the items of lists."""
    for kind in kinds:
        yield kind
        yield from _parts([part for part in get_args(kind) if get_origin(kind) is not Literal])


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def wrong_command(error: str, kinds: Mapping[str, type], name: object) -> InvalidRequest:
    """Convert msgspec's error about a command to an `InvalidRequest` with the field and its allowed values.

    Args:
        kinds: the structs of all commands, by name.
        name: the command's name in the message; it may be wrong.
    """
    at = AT_PATH.fullmatch(error)
    problem, path = (error, "") if at is None else (at["problem"], at["path"])
    kind = kinds.get(name) if isinstance(name, str) else None
    if found := UNKNOWN_FIELD.fullmatch(problem) or MISSING_FIELD.fullmatch(problem):
        field = f"{path}.{found['name']}" if path else found["name"]
        if found.re is UNKNOWN_FIELD:
            return InvalidRequest(field, "is unknown", ", ".join(field_names(kind, path)))
        values = kinds if field == "command" else ["a value, because it is required"]
        return InvalidRequest(field, "is missing", ", ".join(values))
    values = kinds if path == "command" else enum_values(kind, path)
    expected, value = EXPECTED.fullmatch(problem), VALUE.fullmatch(problem)
    return InvalidRequest(
        path or "command",
        f"does not decode: {problem}" if value is None else f"is {value['value']}",
        ", ".join(values) or ("another value" if expected is None else expected["type"]),
    )


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


def decode_document(data: str | bytes, kind: type[T], what: str) -> T:
    """Decode a stored document; `what` is its name in the error message.

    Raises:
        RemoteProtocolError: the data is not such a document, or it contradicts itself.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (*MALFORMED, UnicodeEncodeError) as error:
        # An object's metadata is text and may hold half of a surrogate pair.
        raise RemoteProtocolError(f"{what} does not decode: {error}") from error
