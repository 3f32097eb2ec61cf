"""Reads what a control route is given: a JSON body, or query parameters, as vLLM's clients send them."""

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
"""Parameters that are lists: given several times in a query."""


async def read_fields(service: Service, request: Request, kind: type[Fields]) -> Fields:
    """The fields, from the body or from the query.

    Raises:
        HttpError: 413; 400, naming the field that is unknown, missing, of another type, or given both ways.
        ClientDisconnect: the client went away meanwhile.
    """
    body = await read_body(request, service.settings)
    if not request.query_params:
        return decode_body(body, kind)
    if body.strip() not in (b"", b"{}", b"null"):
        name = next(iter(request.query_params))
        raise invalid(name, "is a query parameter beside a body", "all fields in the one or in the other")
    return read_query(request, kind)


def read_query(request: Request, kind: type[Query]) -> Query:
    """The query's parameters.

    Raises:
        HttpError: 400, naming the parameter that is unknown, of another type, or given several times.
    """
    given: dict[str, str | list[str]] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        given[name] = values if name in REPEATED or len(values) > 1 else values[0]
    # All values are strings there: what they mean is for the field's type to say.
    return decode_body(msgspec.json.encode(given), kind, strict=False)


def either(name: str, value: Value | None, other_name: str, other: Value | None) -> Value | None:
    """A field that has two names.

    Raises:
        HttpError: 400, both are given.
    """
    if value is not None and other is not None:
        raise invalid(other_name, f"is another name of {name}, which is given too", "one of them")
    return other if value is None else value
