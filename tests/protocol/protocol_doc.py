"""Write the generated parts of docs/protocol.md: `python -m tests.protocol.protocol_doc`.

A part lies between `<!-- kind: name -->` and `<!-- end -->`. The parts are the table of subjects, the states of a
machine with the docstrings below them, and its diagram.
"""

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import rollbus.bus.subjects
from rollbus.bus.protocol.attempt.machine import OPEN, OUT, REQUEST, RequestEvent, RequestState
from rollbus.bus.protocol.queue.prefill_queue import PrefillFallback
from rollbus.bus.protocol.states import SPEAKING, WORKER, WORKER_REQUEST, StateMachine, WorkerRequestState
from rollbus.schemas.presence import ClientState, WorkerState
from tests.schemas.wire_tables import bullets, docstrings

DOC = Path(__file__).parents[2] / "docs" / "protocol.md"
PART = re.compile(r"<!-- (\w+: \w+) -->\n.*?<!-- end -->", re.DOTALL)
STATES: dict[str, type[enum.StrEnum]] = {
    "request": RequestState,
    "held": WorkerRequestState,
    "worker": WorkerState,
    "client": ClientState,
}
MACHINES: dict[str, StateMachine[Any, Any]] = {"request": REQUEST, "held": WORKER_REQUEST, "worker": WORKER}


_UNADMITTED = frozenset(
    state
    for (state, event), after in REQUEST.transitions.items()
    if event is RequestEvent.ADMITTED and after is RequestState.RUNNING
)
GROUPS: dict[str, dict[str, frozenset[Any]]] = {
    "request": {
        "any open state": OPEN,
        "any state with a worker": OUT,
        "published, queued or placed": _UNADMITTED,
    },
    "worker": {
        "any state that is not final": SPEAKING | {WorkerState.STARTING, WorkerState.FENCED},
        "updating, and any state that it leads to": SPEAKING,
        "any state that updating leads to": SPEAKING - {WorkerState.UPDATING},
    },
}
"""States that a diagram draws as one state, by machine and label.

An event is drawn once if it leads all of them to the same state.
"""


def with_parts(text: str) -> str:
    """Return the document with each generated part as the code defines it now."""
    return PART.sub(lambda match: f"<!-- {match[1]} -->\n{_part(*match[1].split(': '))}<!-- end -->", text)


def names_of_parts() -> set[str]:
    """Return the names of all parts that the document must have."""
    kinds = {"states": set(STATES), "diagram": set(MACHINES)}
    kinds["table"] = {"subjects", "fallbacks"}
    return {f"{kind}: {name}" for kind, names in kinds.items() for name in names}


def meanings(kind: type[enum.StrEnum]) -> dict[str, str]:
    """Return the docstring below each value that is ever sent or entered, by the value."""
    found = docstrings(inspect.getsource(kind))
    return {member.value: found[member.name] for member in kind if member.name != "UNKNOWN"}


def _part(kind: str, name: str) -> str:
    match kind:
        case "states":
            return _meaning_list(STATES[name])
        case "diagram":
            return f"```mermaid\n{diagram(MACHINES[name])}\n```\n"
        case _:
            return _subjects() if name == "subjects" else _meaning_list(PrefillFallback)


def diagram(machine: StateMachine[Any, Any]) -> str:
    """Return a transition table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {machine.initial}"]
    undrawn = dict(machine.transitions)
    for number, (label, states) in enumerate(GROUPS.get(machine.name, {}).items()):
        lines.append(f'    state "{label}" as group{number}')
        for event in dict.fromkeys(event for _, event in machine.transitions):
            ends = {undrawn.get((state, event)) for state in states}
            if len(ends) == 1 and None not in ends:
                lines.append(f"    group{number} --> {ends.pop()}: {event}")
                undrawn = {key: after for key, after in undrawn.items() if key[0] not in states or key[1] != event}
    lines += [f"    {state} --> {after}: {event}" for (state, event), after in undrawn.items()]
    lines += [f"    {state} --> [*]" for state in sorted(machine.final)]
    return "\n".join(lines)


def _subjects() -> str:
    return "".join(f"{line}\n" for line in (rollbus.bus.subjects.__doc__ or "").splitlines() if line.startswith("|"))


def _meaning_list(kind: type[enum.StrEnum]) -> str:
    return bullets(f"`{value}`: {meaning}" for value, meaning in meanings(kind).items())


if __name__ == "__main__":
    DOC.write_text(with_parts(DOC.read_text()))
