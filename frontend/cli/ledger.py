"""A ledger for people: what each worker answered to a command."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from frontend.ledger import RESULTS, ledger_lines

if TYPE_CHECKING:
    from bus import Ledger
    from schemas.control import Ack

__all__ = ["COLUMNS", "ledger_rows", "summary"]

COLUMNS = ("worker", "result", "version", "seconds", "why")


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
        for line in ledger_lines(ledger)
    ]


def summary(ledger: "Ledger") -> str:
    """The ledger in one line: `pause: applied by 1 of 2 workers in 0.31 s, epoch 7; 1 missing`."""
    applied, total = len(ledger.applied), sum(1 for _ in ledger_lines(ledger))
    share = f"all {total} workers" if applied == total > 1 else f"{applied} of {total} worker{'s' * (total > 1)}"
    others = [f"{len(getattr(ledger, result))} {result}" for result in RESULTS[1:] if getattr(ledger, result)]
    text = f"{ledger.command}: applied by {share} in {ledger.seconds:.2f} s{_epochs(ledger.epochs)}"
    return "; ".join([text, *others, *([f"not found: {', '.join(ledger.not_found)}"] if ledger.not_found else [])])


def _what(ledger: "Ledger", ack: "Ack | None") -> str:
    """What the command did at a worker, where it depends on what was there."""
    if ack is None or ledger.command != "abort":
        return ""
    return f"ended {', '.join(ack.request_ids)}" if ack.request_ids else "had none of them"


def _epochs(epochs: Mapping[str, int]) -> str:
    if len(epochs) == 1:
        return f", epoch {next(iter(epochs.values()))}"
    return "".join(f", epoch {epoch} of {model}" for model, epoch in sorted(epochs.items()))
