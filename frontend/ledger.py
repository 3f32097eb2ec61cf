"""The JSON form of a command result: each worker's ack, for `--json` of the command line and for HTTP answers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..bus.protocol.fleet.command_result import RESULTS, CommandResult
from ..schemas.acks import Ack

__all__ = ["WorkerLine", "ledger_as_json", "ledger_lines"]


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker of a command result."""

    worker: str
    result: str
    ack: Ack | None
    """The worker's last ack; None if no ack arrived."""
    why: str | None
    """The reason why the worker did not apply the command, as text for people; None if it applied the command."""


def ledger_as_json(ledger: CommandResult) -> dict[str, Any]:
    """Return the command result as JSON for programs.

    docs/operate/commands.md documents the names. They never change.
    """
    return {
        "command": ledger.command,
        "id": ledger.id,
        "complete": ledger.is_complete,
        "epochs": ledger.epochs,
        "seconds": round(ledger.seconds, 3),
        "workers": [_line_as_json(line) for line in ledger_lines(ledger)],
        "not_found": list(ledger.not_found),
        "not_awaited": list(ledger.not_awaited),
        "paused_s": None if ledger.paused_s is None else round(ledger.paused_s, 3),
        "warnings": list(ledger.warnings),
    }


def _line_as_json(line: WorkerLine) -> dict[str, Any]:
    ack = line.ack
    code = None if ack is None or ack.error is None else ack.error.code
    found = {"worker": line.worker, "result": line.result, "code": code, "why": line.why}
    if ack is None:
        names = (
            "model",
            "weight_version",
            "in_flight",
            "seconds",
            "stage",
            "canary",
            "request_ids",
            "verified",
            "timing",
        )
        return found | dict.fromkeys(names)
    return found | {
        "model": ack.model,
        "weight_version": ack.weight_version,
        "in_flight": ack.in_flight,
        "seconds": round(ack.seconds, 3),
        "stage": ack.stage,
        "canary": msgspec.to_builtins(ack.canary),
        "request_ids": ack.request_ids,
        # Includes the zeros and empty lists that the wire format omits.
        "verified": None if ack.verified is None else msgspec.structs.asdict(ack.verified),
        "timing": None if ack.timing is None else msgspec.structs.asdict(ack.timing),
    }


def ledger_lines(ledger: CommandResult) -> Iterator[WorkerLine]:
    """Yield each worker of a command result once. Workers that applied the command come first."""
    for result in RESULTS[:-1]:
        acks: Mapping[str, Ack] = getattr(ledger, result)
        for worker, ack in sorted(acks.items()):
            yield WorkerLine(worker, result, ack, _why(result, ack))
    for worker, why in sorted(ledger.missing.items()):
        yield WorkerLine(worker, "missing", None, why)


def _why(result: str, ack: Ack) -> str | None:
    if ack.error is not None:
        return ack.error.message
    if result == "late":
        return f"still in progress at the timeout: {ack.stage or ack.status}"
    return None
