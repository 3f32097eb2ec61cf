"""`/docs`: the OpenAPI document as an HTML page, without scripts and without content from other sites."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from .service import HttpRoute, RouteTable, Service

__all__ = ["REFERENCE_ROUTES", "page"]

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
