"""The OpenAPI document: made of the tables that are served and of the structs that are decoded, so that it fits both.

Beside its routes, a module may say of each of them, by method and path: in `BODIES` what it decodes, in `QUERIES` a
struct of its query parameters, and in `ANSWERS` what it answers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from inspect import getdoc
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.service import Handler, RouteTable, Service
from frontend.http.settings import Settings

__all__ = ["ROUTES", "Answer", "Routes", "document"]

Answer: TypeAlias = object
"""Of a route: the type of its JSON; a media type, for text; None, for an empty answer; or a dict of these by status.

Without an entry it is any JSON. Errors need none: all have the same shape, beside which an answer may say more.
"""
Key: TypeAlias = tuple[str, str]
REF: Final = "#/components/schemas/{name}"
PATH_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's shape."""

    message: str
    """For people."""
    type: str
    """`invalid_request_error` where the request was at fault, else `server_error`."""
    param: str | None
    """The field that is wrong, if one is."""
    code: str
    """For programs."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer of status 400 and above."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All that is served, and what the modules say of it."""

    open: RouteTable
    """For everybody."""
    data: RouteTable
    """With the data token, or that of admins."""
    admin: RouteTable
    """With the admin token."""
    bodies: Mapping[Key, object]
    queries: Mapping[Key, type]
    answers: Mapping[Key, Answer]

    def operations(self, settings: Settings) -> Iterator[tuple[Key, Handler, list[str]]]:
        """Every route with the names of the tokens of which one is asked for."""
        data = [] if settings.token is None else ["token", "admin_token"]
        admin = [] if settings.admin_token is None else ["admin_token"]
        for table, tokens in ((self.open, []), (self.data, data), (self.admin, admin)):
            for key, handler in table.items():
                yield key, handler, tokens


async def openapi(_service: Service, request: Request) -> Response:
    """This document."""
    made: bytes = request.app.state.openapi
    return Response(made, media_type="application/json")


ROUTES: RouteTable = {("GET", "/openapi.json"): openapi}


def document(routes: Routes, settings: Settings) -> dict[str, Any]:
    """The document, as JSON's types."""
    kinds = [*routes.bodies.values(), *routes.queries.values(), ErrorAnswer]
    for answer in routes.answers.values():
        kinds += [kind for _, kind in _by_status(answer)]
    kinds = [kind for kind in kinds if kind is not None and not isinstance(kind, str)]
    made, components = msgspec.json.schema_components(kinds, schema_hook=_schema_of, ref_template=REF)
    # Types are told apart by what they are: unions cannot all be hashed.
    schemas = {id(kind): schema for kind, schema in zip(kinds, made, strict=True)}

    def schema(kind: object) -> dict[str, Any]:
        return schemas[id(kind)]

    paths: dict[str, dict[str, Any]] = {}
    for key, handler, tokens in routes.operations(settings):
        method, path = key
        operation = _operation(routes, key, handler, schema)
        if tokens:
            operation["security"] = [{token: []} for token in tokens]
        paths.setdefault(PATH_PARAMETER.sub(r"{\1}", path), {})[method.lower()] = operation
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rollbus",
            "version": _version(),
            "description": "A fleet of vLLM workers behind a message bus, for clients that speak HTTP.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": bearer, "admin_token": bearer},
        },
    }


def _operation(
    routes: Routes, key: Key, handler: Handler, schema: Callable[[object], dict[str, Any]]
) -> dict[str, Any]:
    method, path = key
    summary, _, description = (getdoc(handler) or "").partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": summary.replace("\n", " ").removesuffix("."),
    }
    if description and "Raises:" not in description:
        operation["description"] = description
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PATH_PARAMETER.findall(path)
    ]
    body = routes.bodies.get(key)
    if (query := routes.queries.get(key)) is not None:
        parameters += _query_parameters(query, is_all=body is None)
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        content = {"application/json": {"schema": schema(body)}}
        operation["requestBody"] = {"required": _needs_fields(body), "content": content}
    answers = {}
    for status, kind in _by_status(routes.answers.get(key, Any)):
        answers[status] = _response(status, kind, schema)
        if status == "200" and _streams(body):
            answers[status]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    answers |= {each: _response(each, ErrorAnswer, schema) for each in ("4XX", "5XX")}
    operation["responses"] = answers
    return operation


def _by_status(answer: Answer) -> list[tuple[str, object]]:
    if isinstance(answer, dict):
        return [(str(status), kind) for status, kind in answer.items()]
    return [("200", answer)]


def _response(status: str, kind: object, schema: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    words = HTTPStatus(int(status)).phrase if status.isdecimal() else "An error"
    if kind is None:
        return {"description": words}
    if isinstance(kind, str):
        return {"description": words, "content": {kind: {"schema": {"type": "string"}}}}
    return {"description": words, "content": {"application/json": {"schema": {} if kind is Any else schema(kind)}}}


def _query_parameters(query: type, *, is_all: bool) -> list[dict[str, Any]]:
    """Of a struct's fields; each is a string on the way, which the route reads as what stands here.

    Args:
        is_all: there is no body in which the same fields may stand, and those that are objects only there.
    """
    (_,), components = msgspec.json.schema_components([query], schema_hook=_schema_of)
    described = components[query.__name__]
    required = described.get("required", ()) if is_all else ()
    return [
        {"name": name, "in": "query", "required": name in required, "schema": schema}
        for name, schema in described["properties"].items()
        if not _has_objects(schema)
    ]


def _has_objects(schema: Mapping[str, Any]) -> bool:
    """Some value of it is no text of one line."""
    kinds = schema.get("anyOf", [schema])
    return any("$ref" in kind or kind.get("type") == "object" for kind in kinds)


def _structs(body: object) -> list[type[msgspec.Struct]]:
    kinds = getattr(body, "__args__", (body,))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def _needs_fields(body: object) -> bool:
    """An empty body counts as `{}`."""
    structs = _structs(body)
    return bool(structs) and all(any(field.required for field in msgspec.structs.fields(kind)) for kind in structs)


def _streams(body: object) -> bool:
    return any(field.encode_name == "stream" for kind in _structs(body) for field in msgspec.structs.fields(kind))


def _schema_of(_kind: type) -> dict[str, Any]:
    """Of types that msgspec does not know: anything."""
    return {}


def _version() -> str:
    try:
        return version("rollbus")
    except PackageNotFoundError:  # imported from a folder
        return "0"
