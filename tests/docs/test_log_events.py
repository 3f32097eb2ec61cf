"""Log events have the form `component.past_tense_event`, followed by named fields."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rollbus.bus.logs import EVENT as LINE

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")
LEVELS = {"debug", "info", "warning", "error", "exception"}
EVENT = re.compile(r"[a-z_]+\.(%s|([a-z]+_)*([a-z]+ed|broken|lost|swept)(_[a-z]+)*)( |$)")
"""The event is the first word of the text. `%s` stands for a state, whose names are participles."""


def log_calls() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each call of a logger."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)) if re.search(r"\blog(ger)?\b", source) else ():
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger"), attr=level), args=[text, *_]):
                        if level not in LEVELS or path.name == "logs.py":
                            continue
                    case ast.Call(args=[ast.Name(id="logger"), text, *_] | [_, ast.Name(id="logger"), text, *_]):
                        pass
                    case _:
                        continue
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield place, str(text.value) if isinstance(text, ast.Constant) else ast.unparse(text)


def test_each_log_text_begins_with_an_event() -> None:
    """Each text that a logger receives is constant: `component.past_tense_event` and named fields."""
    calls = list(log_calls())

    assert len(calls) > 150
    assert [f"{place} {text}" for place, text in calls if not (EVENT.match(text) and LINE.fullmatch(text))] == []
