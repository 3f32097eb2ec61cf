"""Reads docs/http-compatibility.md: one row for each route and each field of a body."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.cli.support import ROOT

PAGE = ROOT / "docs/http-compatibility.md"
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


def route_rows() -> list[RouteRow]:
    """Return all rows of routes."""
    rows = _rows("Routes")
    return [RouteRow(*route.strip("`").partition(" ")[::2], served, why) for route, _, served, why in rows]


def field_rows(body: str) -> list[FieldRow]:
    """Return all rows of the fields of a body."""
    rows = [row for heading in (*SHARED.get(body, ()), body) for row in _rows(heading)]
    return [
        FieldRow(name.strip("`"), json.loads(example.strip("`")), served, why) for name, example, served, why in rows
    ]


def control_rows() -> dict[str, set[str]]:
    """Return the fields of each control route by path."""
    return {route.strip("`").split(" ")[1]: set(re.findall(r"`(\w+)`", fields)) for route, fields in _rows("Commands")}
