"""The OpenAPI document, from the route tables and the structs that decode bodies."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from inspect import getdoc
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...schemas.decoding import JsonObject
from . import Settings
from .service import HttpRoute, RouteTable, Service

Schemas: TypeAlias = Mapping[object, JsonObject]
"""By type: its schema, mostly a reference to a component."""
REF: Final = "#/components/schemas/{name}"
PATH_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


class ErrorDetail(msgspec.Struct, frozen=True):
    """The error in OpenAI's format."""

    message: str
    """Text for people."""
    type: str
    """`invalid_request_error` if the request is invalid, else `server_error`."""
    param: str | None
    """The invalid field, if there is one."""
    code: str
    """Error code for programs."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer with status 400 or above."""

    error: ErrorDetail


async def openapi(_service: Service, request: Request) -> Response:
    """Return this document, which describes all routes with their fields."""
    made: bytes = request.app.state.openapi()
    return Response(made, media_type="application/json")


_DOCUMENT: Final = HttpRoute(openapi)
ROUTES: RouteTable = {("GET", "/openapi.json"): _DOCUMENT, ("GET", "/docs"): _DOCUMENT}


def document(public: RouteTable, data: RouteTable, admin: RouteTable, settings: Settings) -> JsonObject:
    """Return the document as JSON types.

    Args:
        public: routes without a token.
        data: routes that need the data token or the admin token, if these are set.
        admin: routes that need the admin token, if it is set.
    """
    routes = {**public, **data, **admin}
    kinds: list[object] = [ErrorAnswer]
    for route in routes.values():
        kinds += [route.body, route.query, *(kind for _, kind in _by_status(route.answer))]
    described = [kind for kind in dict.fromkeys(kinds) if isinstance(kind, type)]
    made, components = msgspec.json.schema_components(described, schema_hook=_schema_of, ref_template=REF)
    schemas: Schemas = dict(zip(described, made, strict=True))
    paths: dict[str, JsonObject] = {}
    for (method, path), route in routes.items():
        operation = _operation(method, path, route, schemas)
        if (method, path) in data and settings.token is not None:
            operation["security"] = [{"token": []}, {"admin_token": []}]
        elif (method, path) in admin and settings.admin_token is not None:
            operation["security"] = [{"admin_token": []}]
        paths.setdefault(PATH_PARAMETER.sub(r"{\1}", path), {})[method.lower()] = operation
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rollbus",
            "version": __version__,
            "description": "A fleet of vLLM workers behind a message bus, for HTTP clients.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": bearer, "admin_token": bearer},
        },
    }


def _operation(method: str, path: str, route: HttpRoute, schemas: Schemas) -> JsonObject:
    summary, _, description = (getdoc(route.handler) or "").partition("\n\n")
    operation: JsonObject = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": summary.replace("\n", " ").removesuffix("."),
    }
    if description and "Raises:" not in description:
        operation["description"] = description
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PATH_PARAMETER.findall(path)
    ]
    body = route.body
    if route.query is not None:
        parameters += _query_parameters(route.query, is_all=body is None)
    if parameters:
        operation["parameters"] = parameters
    fields = () if body is None else msgspec.structs.fields(body)
    if body is not None:
        # An empty body counts as `{}`.
        is_required = any(field.required for field in fields)
        operation["requestBody"] = {
            "required": is_required,
            "content": {"application/json": {"schema": schemas[body]}},
        }
    answers = {status: _response(status, kind, schemas) for status, kind in _by_status(route.answer)}
    if "200" in answers and any(field.encode_name == "stream" for field in fields):
        answers["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    answers |= {each: _response(each, ErrorAnswer, schemas) for each in ("4XX", "5XX")}
    operation["responses"] = answers
    return operation


def _by_status(answer: object) -> list[tuple[str, object]]:
    if isinstance(answer, dict):
        return [(str(status), kind) for status, kind in answer.items()]
    return [("200", answer)]


def _response(status: str, kind: object, schemas: Schemas) -> JsonObject:
    description = HTTPStatus(int(status)).phrase if status.isdecimal() else "An error"
    if kind is None:
        return {"description": description}
    if isinstance(kind, str):
        return {"description": description, "content": {kind: {"schema": {"type": "string"}}}}
    content = {"application/json": {"schema": {} if kind is Any else schemas[kind]}}
    return {"description": description, "content": content}


def _query_parameters(query: type, *, is_all: bool) -> list[JsonObject]:
    """Return the parameters of a struct's fields. Each parameter is a string in the query, which the route converts.

    Args:
        is_all: True if the route has no body for these fields. Otherwise fields that are objects may only be in the
            body.
    """
    (_,), components = msgspec.json.schema_components([query], schema_hook=_schema_of)
    described = components[query.__name__]
    required = described.get("required", ()) if is_all else ()
    return [
        {"name": name, "in": "query", "required": name in required, "schema": schema}
        for name, schema in described["properties"].items()
        if not any("$ref" in kind or kind.get("type") == "object" for kind in schema.get("anyOf", [schema]))
    ]


def _schema_of(_kind: type) -> JsonObject:
    """Return the schema of a type that msgspec does not know: any value."""
    return {}
