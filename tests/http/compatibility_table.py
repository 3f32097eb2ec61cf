"""Reads docs/http-compatibility.md: the routes, and the fields of each body with an example."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.cli.support import ROOT

PAGE = ROOT / "docs/http-compatibility.md"
HEADINGS = {"yes": "Served routes", "501": "Routes with 501", "404": "Unknown routes"}
"""By `RouteRow.served`: the heading of the table."""
SHARED = {"Chat": ("Sampling", "OpenAI"), "Completions": ("Sampling", "OpenAI"), "sampling_params": ("Sampling",)}
"""By heading of a body: the headings of the tables that it shares with other bodies."""


@dataclass(frozen=True)
class RouteRow:
    """A route."""

    method: str
    path: str
    served: str
    """`yes`. `501`: known, but refused with the reason. `404`: unknown."""
    why: str


@dataclass(frozen=True)
class FieldRow:
    """A field of a body."""

    name: str
    example: Any
    served: str
    """`yes`, `no effect`, `engine` (if the worker's engine supports it) or `no`."""
    why: str


def _rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without the header rows."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def _routes(cell: str) -> Iterator[tuple[str, str]]:
    """Yield method and path of each route of a cell. A path without a method has the method of the route before it."""
    method = ""
    for route in re.findall(r"`([^`]+)`", cell):
        *methods, path = route.split(" ")
        method = methods[0] if methods else method
        yield method, path


def route_rows() -> list[RouteRow]:
    """Return a row for each route."""
    return [
        RouteRow(method, path, served, why)
        for served, heading in HEADINGS.items()
        for cell, *_, why in _rows(heading)
        for method, path in _routes(cell)
    ]


def field_rows(body: str) -> list[FieldRow]:
    """Return a row for each field of a body."""
    return [
        FieldRow(name, json.loads(example), served, why)
        for heading in (*SHARED.get(body, ()), body)
        for served, fields, why in _rows(heading)
        for name, example in re.findall(r"`(\w+): ([^`]+)`", fields)
    ]


def control_rows() -> dict[str, set[str]]:
    """Return the fields of each control route by path."""
    return {
        path: set(re.findall(r"`(\w+)`", fields)) for cell, fields in _rows("Commands") for _, path in _routes(cell)
    }
