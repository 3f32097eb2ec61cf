"""Reading and decoding of request bodies, with a size limit and with the name of the invalid field.

A value of another JSON type than its field is read as vLLM's server reads it, in the lax mode of pydantic: `"2"` and
`true` are integers. The rules here are the same, except that a number is always finite. The bus stays strict.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import fields
from starlette.requests import ClientDisconnect, Request

from ...schemas.decoding import MALFORMED, MISSING_FIELD, UNKNOWN_FIELD, enum_values, field_names, nearest
from ...schemas.errors import ErrorCode
from . import Settings
from .errors import HttpError

NO_TEXT: Final = Meta(extra={"lax": "no text"})
"""Marks an integer that may not be text. vLLM checks some fields before pydantic reads them."""
STRICT: Final = Meta(extra={"lax": "nothing"})
"""Marks a field that is read strictly."""
MAX_ITEMS: Final = 1 << 17
"""Items of lists and objects that are read leniently in one body, as many as the longest prompts have. It bounds the
time of the event loop to less than a second. A list whose items all have the right type does not count."""
WHOLE: Final = re.compile(r"([+-]?[\d_]+)(?:\.0+)?", re.ASCII)
TRUE: Final = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE: Final = frozenset({"false", "f", "no", "n", "off", "0"})


def _integer(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, str) and (whole := WHOLE.fullmatch(value.strip())) is not None:
        try:
            return int(whole[1])
        except ValueError:  # underscores that separate no digits, or too many digits
            return value
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value.strip().isascii():
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _boolean(value: object) -> object:
    if isinstance(value, str):
        known = value.lower()
        return True if known in TRUE else False if known in FALSE else value
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


SCALARS: Final[Mapping[object, Callable[[object], object]]] = {int: _integer, float: _number, bool: _boolean}
"""By type: returns the value that a JSON value stands for, or the JSON value itself if it stands for none."""


@cache
def _kinds_of(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the types of the struct's fields by name."""
    return {field.encode_name: field.type for field in fields(struct)}


class LaxReader:
    """Reads one body."""

    def __init__(self) -> None:
        self._left = MAX_ITEMS

    def read(self, value: Any, kind: Any) -> Any:
        """Return a decoded JSON value with the types of `kind`. What fits no rule stays as it is, and so it is wrong.

        Args:
            kind: a type that msgspec decodes.
        """
        origin, args = get_origin(kind), get_args(kind)
        if kind in SCALARS:
            return SCALARS[kind](value)
        if origin is Annotated:
            return self._read_annotated(value, kind)
        if origin in (Union, UnionType):
            return self._one_of(value, args)
        if origin is Literal:
            return number if (number := _integer(value)) in args and type(number) is int else value
        if isinstance(value, list) and origin in (list, tuple):
            each = args if origin is tuple and args[-1] is not ... else args[:1] * len(value)
            return self._items(value, each) if len(each) == len(value) else value
        if isinstance(value, dict) and origin is dict:
            return dict(zip(value, self._items(list(value.values()), args[1:] * len(value)), strict=True))
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            kinds = _kinds_of(kind)
            return {name: self.read(each, kinds[name]) if name in kinds else each for name, each in value.items()}
        return value

    def _read_annotated(self, value: Any, kind: Any) -> Any:
        bare, *metas = get_args(kind)
        if STRICT in metas or (NO_TEXT in metas and isinstance(value, str)):
            return value
        return self.read(value, bare)

    def _one_of(self, value: Any, kinds: tuple[Any, ...]) -> Any:
        """Return the value as the first of several types that it has exactly, or else that it can be read as."""
        kinds = tuple(kind for kind in kinds if kind is not NoneType)
        if value is None or type(value) in kinds:
            return value
        if len(kinds) == 1:
            return self.read(value, kinds[0])
        if any(_fits(value, kind) for kind in kinds):
            return value
        for kind in kinds:
            found = self.read(value, kind)
            if _fits(found, kind):
                return found
        return value

    def _items(self, values: list[Any], kinds: tuple[Any, ...]) -> list[Any]:
        # The long lists have only token ids. Decide about them without a call for each.
        if len(set(kinds)) == 1 and set(map(type, values)) <= _members(kinds[0]):
            return values
        self._left -= len(values)
        if self._left < 0:
            return values
        return [self.read(value, kind) for value, kind in zip(values, kinds, strict=True)]


def _members(kind: Any) -> set[Any]:
    """Return the types without conditions that a value of this type may have."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    return set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError):
        return False
    return True


T = TypeVar("T")

AT_PATH = re.compile(r"(?P<problem>.*?) - at `(?:key` in `)?\$(?P<path>.*)`", re.DOTALL)
"""The format in which msgspec reports the path of an error in a document."""

CLOSE = {"Connection": "close"}
"""Header for answers sent before the whole body is read: the connection cannot be reused."""
NUMBERS_AND_SPACE = b"0123456789+-., \t\r\n"
MAX_SKELETON_BYTES = 64 << 10
NAME_OR_STRING = re.compile(rb'("[^"]*":)|"[^"]*"')


async def read_body(request: Request, settings: Settings) -> bytes:
    """Return the whole body.

    Raises:
        HttpError: 413, as soon as the received or announced size exceeds the limit; 408, the body does not arrive in
            time.
        ClientDisconnect: the client disconnected meanwhile.
    """
    cycle = request.scope["state"]["cycle"]
    if not (cycle.more_body or cycle.disconnected):
        # The body is there: nothing waits.
        body, cycle.body = bytes(cycle.body), bytearray()
        if len(body) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        return body
    try:
        async with asyncio.timeout(settings.client_timeout_s):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive in time; allowed: {settings.client_timeout_s:g} s"
        raise HttpError(408, message, code="body_timeout", headers=CLOSE) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts, size, has_more = list[bytes](), 0, True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        has_more = message["more_body"]
        parts.append(message["body"])
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is too large; allowed: {max_bytes} bytes", code="too_large", headers=CLOSE)


def decode_body(data: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct that forbids unknown fields.

    Values of another type are read as vLLM's server reads them (`LaxReader`). Only bodies that have one cost that time.

    Raises:
        HttpError: 400, naming the field that is unknown, missing, or of another type.
    """
    try:
        _refuse_duplicates(data)
        try:
            return msgspec.json.decode(data or b"{}", type=kind)
        except msgspec.ValidationError as error:
            return _decode_leniently(data, kind, error)
    except msgspec.ValidationError as error:
        message, field = _explain(str(error), kind)
        raise HttpError(400, message, code=ErrorCode.INVALID_REQUEST, param=field) from None
    except MALFORMED as error:
        raise HttpError(400, f"the body is not JSON: {error}", code=ErrorCode.INVALID_REQUEST) from None


def _decode_leniently(data: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    try:
        found = msgspec.json.decode(data)
    except msgspec.ValidationError:
        raise error from None  # a number is too large: `error` names its field
    return msgspec.convert(LaxReader().read(found, kind), kind, str_keys=True)


def _refuse_duplicates(data: bytes) -> None:
    """Reject an object that has a name twice. Some programs use the first value and some the last.

    Raises:
        HttpError: 400, naming it.
        RecursionError: the body is nested too deeply.
    """
    if _has_no_duplicates(data):
        return
    try:
        json.loads(data.decode(), object_pairs_hook=_only_once)
    except ValueError:
        return  # not JSON, or a number is too long: the decoder reports it with a better message


def _has_no_duplicates(data: bytes) -> bool:
    """True if the body has no duplicate names.

    The check does not parse the body: a body is mostly token ids, and the rest is short.
    """
    skeleton = data.translate(None, NUMBERS_AND_SPACE)
    if len(skeleton) > MAX_SKELETON_BYTES or b"\\" in skeleton:
        return False
    # Each other string is an empty match.
    names = list(filter(None, NAME_OR_STRING.findall(skeleton)))
    return len(names) == len(set(names))


def _only_once(pairs: list[tuple[str, object]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise HttpError(400, f"{name} is given twice; allowed: once", code=ErrorCode.INVALID_REQUEST, param=name)
        names.add(name)


def _explain(text: str, kind: object) -> tuple[str, str | None]:
    """Return a message that begins with the field's name, and the name.

    The name is None if the whole body is invalid.
    """
    at = AT_PATH.fullmatch(text)
    problem, path = (text, "") if at is None else (at["problem"], at["path"].lstrip("."))
    if found := UNKNOWN_FIELD.fullmatch(problem) or MISSING_FIELD.fullmatch(problem):
        field = f"{path}.{found['name']}" if path else found["name"]
        if found.re is MISSING_FIELD:
            return f"{field} is missing; it is required", field
        return (
            f"{field} is unknown{nearest(found['name'], field_names(kind, path))}; allowed: the documented parameters",
            field,
        )
    if problem.startswith("Invalid enum value"):
        problem += f"; allowed: {', '.join(enum_values(kind, path))}"
    problem = problem[:1].lower() + problem[1:]
    return (f"{path}: {problem}", path) if path else (f"the body: {problem}", None)
