"""Write the generated parts of docs/protocol.md: `python -m tests.protocol.protocol_doc`.

A part stands between `<!-- kind: name -->` and `<!-- end -->`: the table of subjects, the states of a machine with the
docstrings below them, its events, and its diagram.
"""

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import bus.subjects
from bus.protocol.prefill import Alone
from bus.protocol.states import (
    HELD,
    REQUEST,
    WORKER,
    HeldEvent,
    HeldState,
    Machine,
    RequestEvent,
    RequestState,
    WorkerEvent,
)
from schemas.presence import ClientState, WorkerState
from tests.schemas.wire_tables import docstrings, markdown

__all__ = ["DOC", "STATES", "meanings", "names_of_parts", "with_parts"]

DOC = Path(__file__).parents[2] / "docs" / "protocol.md"
PART = re.compile(r"<!-- (\w+: \w+) -->\n.*?<!-- end -->", re.DOTALL)
STATES: dict[str, type[enum.StrEnum]] = {
    "request": RequestState,
    "held": HeldState,
    "worker": WorkerState,
    "client": ClientState,
}
EVENTS: dict[str, type[enum.StrEnum]] = {"request": RequestEvent, "held": HeldEvent, "worker": WorkerEvent}
MACHINES: dict[str, Machine[Any, Any]] = {"request": REQUEST, "held": HELD, "worker": WORKER}


def with_parts(text: str) -> str:
    """The document with every generated part as the code has it now."""
    return PART.sub(lambda match: f"<!-- {match[1]} -->\n{_part(*match[1].split(': '))}<!-- end -->", text)


def names_of_parts() -> set[str]:
    """All parts that the document must have."""
    kinds = {"states": set(STATES), "events": set(EVENTS), "diagram": set(MACHINES)}
    kinds["table"] = {"subjects", "fallbacks"}
    return {f"{kind}: {name}" for kind, names in kinds.items() for name in names}


def meanings(kind: type[enum.StrEnum]) -> dict[str, str]:
    """The docstring below each value that is ever sent or entered, by the value."""
    found = docstrings(inspect.getsource(kind))
    return {member.value: found[member.name] for member in kind if member.name != "UNKNOWN"}


def _part(kind: str, name: str) -> str:
    match kind:
        case "states":
            return _meaning_table("state", STATES[name])
        case "events":
            return _meaning_table("event", EVENTS[name])
        case "diagram":
            return f"```mermaid\n{MACHINES[name].diagram()}\n```\n"
        case _:
            return _subjects() if name == "subjects" else _meaning_table("reason", Alone)


def _subjects() -> str:
    return "".join(f"{line}\n" for line in (bus.subjects.__doc__ or "").splitlines() if line.startswith("|"))


def _meaning_table(head: str, kind: type[enum.StrEnum]) -> str:
    return markdown([head, "meaning"], ([f"`{value}`", meaning] for value, meaning in meanings(kind).items()))


if __name__ == "__main__":
    DOC.write_text(with_parts(DOC.read_text()))
