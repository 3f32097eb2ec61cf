"""Formats a command result: the ack of each worker."""

from collections.abc import Mapping

from ...bus.protocol.fleet.command_result import RESULTS, CommandResult
from ...schemas.acks import Ack
from ...schemas.weights import UpdateTiming, Verified
from ..ledger import ledger_lines
from .byte_counts import size

__all__ = ["COLUMNS", "ledger_rows", "summary"]

MAX_NAMED = 3
"""Maximum number of modules named in a line. `--json` lists more."""
COLUMNS = ("result", "worker", "version", "seconds", "why")


def ledger_rows(ledger: CommandResult) -> list[list[str]]:
    """Return the cells of `COLUMNS` for each worker. Workers that applied the command come last."""
    return [
        [
            line.result,
            line.worker,
            "-" if line.ack is None else str(line.ack.weight_version),
            "-" if line.ack is None else f"{line.ack.seconds:.2f}",
            line.why or _what(ledger, line.ack) or "-",
        ]
        for line in sorted(ledger_lines(ledger), key=lambda line: line.result == "applied")
    ]


def summary(ledger: CommandResult) -> str:
    """Return the result in one line: `pause: applied by 1 of 2 workers in 0.31 s, epoch 7; 1 missing`."""
    applied, total = len(ledger.applied), sum(1 for _ in ledger_lines(ledger))
    share = f"all {total} workers" if applied == total > 1 else f"{applied} of {total} worker{'s' * (total > 1)}"
    others = [f"{len(getattr(ledger, result))} {result}" for result in RESULTS[1:] if getattr(ledger, result)]
    text = f"{ledger.command}: applied by {share} in {ledger.seconds:.2f} s{_epochs(ledger.epochs)}"
    if ledger.paused_s is not None:
        text += f", paused {ledger.paused_s:.2f} s"
    not_awaited = [f"not waited for: {', '.join(ledger.not_awaited)}"] if ledger.not_awaited else []
    not_found = [f"not found: {', '.join(ledger.not_found)}"] if ledger.not_found else []
    return "; ".join([text, *others, *not_awaited, *not_found])


def _what(ledger: CommandResult, ack: Ack | None) -> str:
    """Return details of the command at a worker, if they depend on the state of the worker."""
    if ack is None:
        return ""
    if ledger.command != "abort":
        verified = "" if ack.verified is None else _what_was_verified(ack.verified)
        return "; ".join(filter(None, (verified, "" if ack.timing is None else _where_time_went(ack.timing))))
    return f"aborted {', '.join(ack.request_ids)}" if ack.request_ids else "had none of these requests"


def _where_time_went(timing: UpdateTiming) -> str:
    """Return for example `staged 2.1 s (34 MiB fetched), waited 0.1 s, paused 0.9 s (loaded 0.6 s, canary 0.2 s)`."""
    fetched = f" ({size(timing.fetched_bytes)} fetched)" if timing.fetched_bytes else ""
    staged = f"staged {timing.staged_s:.1f} s{fetched}"
    if not timing.paused_s:
        return staged
    paused = f"paused {timing.paused_s:.2f} s (loaded {timing.loaded_s:.2f} s, canary {timing.canary_s:.2f} s)"
    return f"{staged}, waited {timing.waited_s:.2f} s, {paused}"


def _what_was_verified(verified: Verified) -> str:
    text = f"{verified.probed} modules probed, {verified.equal} equal"
    if verified.seconds:
        text += f" in {verified.seconds:.2f} s"
    if not verified.num_unprobed:
        return text
    more = verified.num_unprobed - MAX_NAMED
    named = ", ".join(verified.unprobed[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{text}, not probed: {named}"


def _epochs(epochs: Mapping[str, int]) -> str:
    if len(epochs) == 1:
        return f", epoch {next(iter(epochs.values()))}"
    return "".join(f", epoch {epoch} of {model}" for model, epoch in sorted(epochs.items()))
