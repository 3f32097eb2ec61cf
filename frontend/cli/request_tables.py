"""Formats a list of requests as a table and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ...bus import RequestList, WorkerTimeline
from ...bus.protocol.telemetry.request_trace import seconds_of
from ...schemas.telemetry import RequestKind
from .tables import NONE, TableLines, lay_out, printable, wrapped
from .trace_tables import silent_lines

__all__ = ["id_of", "list_as_json", "list_notes", "list_table", "request_rows", "state_of"]

COLUMNS: Final = ("state", "request", "seconds", "tokens", "no token for", "worker", "client", "attempt", "model")
_STATES: Final = {
    "published": "arrives",
    "offered": "waits for a slot",
    "started": "prefill",
    "restarted": "prefill",
    "prefilled": "decode",
    "first_token": "decode",
    "resumed": "decode",
    "weights": "decode",
}
"""The state of a request after each event, for people."""
_TITLES: Final = {
    "running": "in flight, the longest time without a token first",
    "slowest": "in flight or ended, the slowest first",
    "failed": "failed, the last first",
    "resumed": "resumed after a loss, the last first",
}


def list_table(found: RequestList, width: int) -> TableLines:
    """Return the table of a list."""
    return lay_out(COLUMNS, list(request_rows(found.timelines)), width)


def request_rows(timelines: Sequence[WorkerTimeline]) -> Iterator[list[str]]:
    """Yield the cells of `COLUMNS` for each request."""
    for timeline in timelines:
        ended, progress, seconds = timeline.events[-1:], timeline.progress, seconds_of(timeline)
        tokens = progress.tokens if progress else ended[0].tokens if ended else None
        sample = f" #{timeline.child}" if timeline.child else ""
        yield [
            state_of(timeline),
            f"{id_of(timeline)}{sample}",
            NONE if seconds is None else f"{seconds:.1f}",
            NONE if tokens is None else f"{tokens:,}",
            f"{progress.idle_s:.1f} s" if progress else NONE,
            timeline.worker,
            timeline.client,
            str(timeline.number) if timeline.number > 1 else NONE,
            timeline.model,
        ]


def state_of(timeline: WorkerTimeline) -> str:
    """Return what a request does now, or how it ended."""
    if not timeline.events:
        return NONE
    last = timeline.events[-1]
    if last.event == "held":
        return f"held by {last.reason or 'a pause'}"
    return last.reason or "ended" if last.event == "ended" else _STATES.get(last.event, last.event)


def id_of(timeline: WorkerTimeline) -> str:
    """Return the id of a request as its caller gave it."""
    return timeline.given_id or timeline.request_id


def list_notes(show: RequestKind, found: RequestList, width: int) -> list[str]:
    """Return the lines above a table: its title, and what it lacks."""
    number = len(found.timelines)
    of = f"{number} of {number + found.left_out}" if found.left_out else f"{number}" if number else "no"
    workers = f"at {found.workers_answered} worker{'s' * (found.workers_answered != 1)}"
    lines = [f"{of} request{'s' * (number != 1)} {workers}: {_TITLES[show]}", *map(printable, silent_lines(found))]
    return [part for line in lines for part in wrapped(line, width)]


def list_as_json(show: RequestKind, found: RequestList) -> dict[str, Any]:
    """Return the output of `rollbus requests --json`."""
    return {"show": show, **msgspec.to_builtins(found), "silent": list(found.silent)}
