"""Reading and decoding of request bodies, with a size limit and with the name of the invalid field."""

import asyncio
import json
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from ...schemas.errors import ErrorCode
from ...schemas.explain import MISSING_FIELD, UNKNOWN_FIELD, enum_values, field_names, nearest
from .errors import HttpError
from .lax import LaxReader
from .settings import Settings

__all__ = ["decode_body", "read_body"]

T = TypeVar("T")

AT_PATH = re.compile(r"(?P<problem>.*?) - at `(?:key` in `)?\$(?P<path>.*)`", re.DOTALL)
"""The format in which msgspec reports the path of an error in a document."""

CLOSE = {"Connection": "close"}
"""Header for answers sent before the whole body is read: the connection cannot be reused."""
NUMBERS_AND_SPACE = b"0123456789+-., \t\r\n"
MAX_SKELETON_BYTES = 64 << 10
STRING = re.compile(rb'"[^"]*":?')


async def read_body(request: Request, settings: Settings) -> bytes:
    """Return the whole body.

    Raises:
        HttpError: 413, as soon as the received or announced size exceeds the limit; 408, the body does not arrive in
            time.
        ClientDisconnect: the client disconnected meanwhile.
    """
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
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is too large; allowed: {max_bytes} bytes", code="too_large", headers=CLOSE)


def decode_body(data: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct that forbids unknown fields.

    Values of another type are read as vLLM's server reads them (`lax.py`). Only bodies that have one cost that time.

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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
    names = [string for string in STRING.findall(skeleton) if string.endswith(b":")]
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
