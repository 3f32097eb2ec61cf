"""The OpenAPI document, from the route tables and the structs that decode bodies, and `/docs`, its page."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from http import HTTPStatus
from inspect import getdoc
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ... import __version__
from .service import HttpRoute, RouteTable, Service
from .settings import Settings

Key: TypeAlias = tuple[str, str]
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
    """Return this document."""
    made: bytes = request.app.state.openapi
    return Response(made, media_type="application/json")


ROUTES: RouteTable = {("GET", "/openapi.json"): HttpRoute(openapi)}


def document(public: RouteTable, data: RouteTable, admin: RouteTable, settings: Settings) -> dict[str, Any]:
    """Return the document as JSON types.

    Args:
        public: routes without a token.
        data: routes that need the data token or the admin token, if these are set.
        admin: routes that need the admin token, if it is set.
    """
    routes = {**public, **data, **admin}
    kinds: list[object] = [route.body for route in routes.values()]
    kinds += [*(route.query for route in routes.values()), ErrorAnswer]
    kinds += [kind for route in routes.values() for _, kind in _by_status(route.answer)]
    kinds = [kind for kind in kinds if kind is not None and not isinstance(kind, str)]
    made, components = msgspec.json.schema_components(kinds, schema_hook=_schema_of, ref_template=REF)
    # Types are compared by identity, because not every union can be hashed.
    schemas = {id(kind): schema for kind, schema in zip(kinds, made, strict=True)}

    def schema(kind: object) -> dict[str, Any]:
        return schemas[id(kind)]

    paths: dict[str, dict[str, Any]] = {}
    for (method, path), route in routes.items():
        operation = _operation(method, path, route, schema)
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


def _operation(method: str, path: str, route: HttpRoute, schema: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    summary, _, description = (getdoc(route.handler) or "").partition("\n\n")
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
    body = route.body
    if route.query is not None:
        parameters += _query_parameters(route.query, is_all=body is None)
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        content = {"application/json": {"schema": schema(body)}}
        operation["requestBody"] = {"required": _needs_fields(body), "content": content}
    answers = {}
    for status, kind in _by_status(route.answer):
        answers[status] = _response(status, kind, schema)
        if status == "200" and _streams(body):
            answers[status]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    answers |= {each: _response(each, ErrorAnswer, schema) for each in ("4XX", "5XX")}
    operation["responses"] = answers
    return operation


def _by_status(answer: object) -> list[tuple[str, object]]:
    if isinstance(answer, dict):
        return [(str(status), kind) for status, kind in answer.items()]
    return [("200", answer)]


def _response(status: str, kind: object, schema: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    description = HTTPStatus(int(status)).phrase if status.isdecimal() else "An error"
    if kind is None:
        return {"description": description}
    if isinstance(kind, str):
        return {"description": description, "content": {kind: {"schema": {"type": "string"}}}}
    content = {"application/json": {"schema": {} if kind is Any else schema(kind)}}
    return {"description": description, "content": content}


def _query_parameters(query: type, *, is_all: bool) -> list[dict[str, Any]]:
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
        if not _has_objects(schema)
    ]


def _has_objects(schema: Mapping[str, Any]) -> bool:
    """True if the schema allows an object."""
    kinds = schema.get("anyOf", [schema])
    return any("$ref" in kind or kind.get("type") == "object" for kind in kinds)


def _structs(body: object) -> list[type[msgspec.Struct]]:
    kinds = getattr(body, "__args__", (body,))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def _needs_fields(body: object) -> bool:
    """True if the body has required fields. An empty body counts as `{}`."""
    structs = _structs(body)
    return bool(structs) and all(any(field.required for field in msgspec.structs.fields(kind)) for kind in structs)


def _streams(body: object) -> bool:
    return any(field.encode_name == "stream" for kind in _structs(body) for field in msgspec.structs.fields(kind))


def _schema_of(_kind: type) -> dict[str, Any]:
    """Return the schema of a type that msgspec does not know: any value."""
    return {}


STYLE: Final = (
    "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .5rem;text-align:left;vertical-align:top}"
    "h2{margin-top:2rem;font:600 1rem monospace}summary{cursor:pointer}"
)
POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""The browser loads and runs nothing for this page except its own style."""
HEADERS: Final = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}


async def reference(_service: Service, request: Request) -> Response:
    """Return all routes with their fields as a page."""
    made: str = request.app.state.reference_page
    return HTMLResponse(made, headers=HEADERS)


REFERENCE_ROUTES: RouteTable = {("GET", "/docs"): HttpRoute(reference, answer="text/html")}


def page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(info['description'])} For programs: <a href=openapi.json>openapi.json</a>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation_row(f"{method.upper()} {path}", operation)
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h2 id={escape(name)}>{escape(name)}</h2><p>{escape(schema.get('description', ''))}")
        parts += _fields(schema.get("properties", {}), schema.get("required", ()))
    return "".join(parts)


def _operation_row(name: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2 id={escape(operation['operationId'])}>{escape(name)}</h2><p>{escape(operation['summary'])}."
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}"
    if "security" in operation:
        yield f"<p>Bearer token: {escape(' or '.join(key for each in operation['security'] for key in each))}."
    parameters = {each["name"]: each["schema"] for each in operation.get("parameters", ())}
    if parameters:
        yield "<p>Parameters of the path or the query:"
        yield from _fields(parameters, [each["name"] for each in operation["parameters"] if each["required"]])
    if "requestBody" in operation:
        yield f"<p>Body: {_kind(operation['requestBody']['content']['application/json']['schema'])}"
    for status, answer in operation["responses"].items():
        shown = [f"{escape(media)} {_kind(each['schema'])}" for media, each in answer.get("content", {}).items()]
        yield f"<p>{escape(status)}: {', '.join(shown) or 'no body'}"


def _fields(properties: Mapping[str, Any], required: object) -> Iterator[str]:
    if not properties:
        return
    names = required if isinstance(required, list | tuple) else ()
    yield "<table><tr><th>field<th>type<th>meaning"
    for name, schema in properties.items():
        needed = " (required)" if name in names else ""
        described = escape(schema.get("description", ""))
        yield f"<tr><td>{escape(name)}{needed}<td>{_kind(schema)}<td>{described}"
    yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a short text for a schema, with links to named schemas."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href=#{name}>{name}</a>"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(map(_kind, schema[key]))
    if "enum" in schema:
        return escape(" | ".join(map(repr, schema["enum"])))
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_kind(items)}" if isinstance(items, dict) else "list"
    return escape(str(schema.get("type", "anything")))
