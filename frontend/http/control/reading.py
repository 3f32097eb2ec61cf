"""Decoding of the fields of a control route, from a JSON body or from query parameters as vLLM's clients send them."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from ..body import decode_body, read_body
from ..errors import invalid
from ..service import Service
from .bodies import SendBody

__all__ = ["either", "read_fields", "read_query"]

Fields = TypeVar("Fields", bound=SendBody)
Query = TypeVar("Query", bound=msgspec.Struct)
Value = TypeVar("Value")

REPEATED = ("workers", "request_ids", "tags")
"""Parameters that are lists. A query repeats them, once for each item."""


async def read_fields(service: Service, request: Request, kind: type[Fields]) -> Fields:
    """Return the fields from the body or from the query.

    Raises:
        HttpError: 413 if the body is too large. 400 if a field is unknown, is missing or has the wrong type, or if body
            and query both have fields; the error names the field.
        ClientDisconnect: the client disconnected before its body was complete.
    """
    body = await read_body(request, service.settings)
    if not request.query_params:
        return decode_body(body, kind)
    if body.strip() not in (b"", b"{}", b"null"):
        name = next(iter(request.query_params))
        raise invalid(name, "is a query parameter, but the request has a body too", "all fields in one of them")
    return read_query(request, kind)


def read_query(request: Request, kind: type[Query]) -> Query:
    """Return the query parameters as a struct.

    Raises:
        HttpError: 400 if a parameter is unknown, has the wrong type or is repeated; the error names the parameter.
    """
    given: dict[str, str | list[str]] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        given[name] = values if name in REPEATED or len(values) > 1 else values[0]
    # All values in a query are strings. The type of each field decides how its string is converted.
    return decode_body(msgspec.json.encode(given), kind)


def either(name: str, value: Value | None, other_name: str, other: Value | None) -> Value | None:
    """Return the value of a field that has two names.

    Raises:
        HttpError: 400, both names have a value.
    """
    if value is not None and other is not None:
        raise invalid(other_name, f"is another name for {name}, which is also given", "one of the two")
    return other if value is None else value
