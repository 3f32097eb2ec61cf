"""A ledger for people and for programs: what each worker answered to a command."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from bus import Ledger
    from schemas.control import Ack

__all__ = ["COLUMNS", "ledger_as_json", "ledger_rows", "summary"]

COLUMNS = ("worker", "result", "version", "seconds", "why")
RESULTS = ("applied", "failed", "unsupported", "stale", "late", "missing")
"""As the ledger calls them, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Line:
    """One worker of a ledger."""

    worker: str
    result: str
    ack: "Ack | None"
    """Its last answer; None where it is missing."""
    why: str | None
    """Why it did not apply the command, for people."""


def ledger_rows(ledger: "Ledger") -> list[list[str]]:
    """The cells of `COLUMNS` for each worker, those that applied the command first."""
    return [
        [
            line.worker,
            line.result,
            "-" if line.ack is None else str(line.ack.weight_version),
            "-" if line.ack is None else f"{line.ack.seconds:.2f}",
            line.why or _what(ledger, line.ack) or "-",
        ]
        for line in _lines(ledger)
    ]


def summary(ledger: "Ledger") -> str:
    """The ledger in one line: `pause: applied by 1 of 2 workers in 0.31 s, epoch 7; 1 missing`."""
    applied, total = len(ledger.applied), sum(1 for _ in _lines(ledger))
    share = f"all {total} workers" if applied == total > 1 else f"{applied} of {total} worker{'s' * (total > 1)}"
    others = [f"{len(getattr(ledger, result))} {result}" for result in RESULTS[1:] if getattr(ledger, result)]
    text = f"{ledger.command}: applied by {share} in {ledger.seconds:.2f} s{_epochs(ledger.epochs)}"
    return "; ".join([text, *others, *([f"not found: {', '.join(ledger.not_found)}"] if ledger.not_found else [])])


def ledger_as_json(ledger: "Ledger") -> dict[str, Any]:
    """The ledger as `--json` prints it; its names are documented in docs/operations.md and do not change."""
    return {
        "command": ledger.command,
        "id": ledger.id,
        "complete": ledger.is_complete,
        "epochs": ledger.epochs,
        "seconds": round(ledger.seconds, 3),
        "workers": [_line_as_json(line) for line in _lines(ledger)],
        "not_found": list(ledger.not_found),
    }


def _line_as_json(line: Line) -> dict[str, Any]:
    ack = line.ack
    return {
        "worker": line.worker,
        "result": line.result,
        "code": None if ack is None or ack.error is None else ack.error.code,
        "why": line.why,
        "model": None if ack is None else ack.model,
        "weight_version": None if ack is None else ack.weight_version,
        "in_flight": None if ack is None else ack.in_flight,
        "seconds": None if ack is None else round(ack.seconds, 3),
        "stage": None if ack is None else ack.stage,
        "canary": None if ack is None else msgspec.to_builtins(ack.canary),
        "request_ids": None if ack is None else ack.request_ids,
    }


def _lines(ledger: "Ledger") -> Iterator[Line]:
    for result in RESULTS[:-1]:
        acks: Mapping[str, Ack] = getattr(ledger, result)
        for worker, ack in sorted(acks.items()):
            yield Line(worker, result, ack, _why(result, ack))
    for worker, why in sorted(ledger.missing.items()):
        yield Line(worker, "missing", None, why)


def _why(result: str, ack: "Ack") -> str | None:
    if ack.error is not None:
        return ack.error.message
    if result == "late":
        return f"still at it when the time was up: {ack.stage or ack.status}"
    return None


def _what(ledger: "Ledger", ack: "Ack | None") -> str:
    """What the command did at a worker, where it depends on what was there."""
    if ack is None or ledger.command != "abort":
        return ""
    return f"ended {', '.join(ack.request_ids)}" if ack.request_ids else "had none of them"


def _epochs(epochs: Mapping[str, int]) -> str:
    if len(epochs) == 1:
        return f", epoch {next(iter(epochs.values()))}"
    return "".join(f", epoch {epoch} of {model}" for model, epoch in sorted(epochs.items()))
