"""Prints the history of a request as tables: two lines for each attempt, and a line for each event."""

from collections.abc import Iterator

from ...bus.protocol.telemetry.request_trace import (
    Phases,
    RequestList,
    RequestTrace,
    WorkerTimeline,
    clock_skews,
    phases_of,
)
from ...schemas.telemetry import TimelineEvent
from .tables import lay_out, printable, wrapped

__all__ = ["attempt_rows", "event_rows", "notes", "phase_rows", "silent_lines", "trace_lines"]

ATTEMPTS = ("attempt", "worker", "phase", "lane", "prompt", "tokens", "versions", "end")
SECONDS = ("attempt", "worker", "queue", "slot", "prefill", "decode", "paused", "tokens/s")
"""Columns of the second table. A single table would be too wide for a terminal of 80 columns."""
EVENTS = ("attempt", "worker", "at", "took", "event", "")
MAX_SHOWN = 16
"""Maximum number of timelines whose events are listed. The timelines of a group then fit on a few screens. --json lists
the events of all timelines."""


def trace_lines(trace: RequestTrace, width: int) -> list[str]:
    """Return the tables of a trace that has a timeline."""
    clients = ", ".join(dict.fromkeys(printable(timeline.client) for timeline in trace.timelines))
    models = ", ".join(dict.fromkeys(map(_model, trace.timelines)))
    return [
        *wrapped(f"request {trace.request_id} of client {clients} to {models}", width),
        "",
        *lay_out(ATTEMPTS, list(attempt_rows(trace)), width).lines,
        *("", "seconds in each phase", ""),
        *lay_out(SECONDS, list(phase_rows(trace)), width).lines,
        *("", "seconds since the first event, and since the previous event", ""),
        *lay_out(EVENTS, list(event_rows(trace)), width).lines,
        *(line for note in notes(trace) for line in wrapped(note, width)),
    ]


def attempt_rows(trace: RequestTrace) -> Iterator[list[str]]:
    """Yield a line for each timeline: its worker, its size and its end."""
    for timeline in trace.timelines:
        ended, lost = _find(timeline, "ended"), _find(timeline, "lost")
        last = ended or lost
        versions = [event.weight_version for event in timeline.events if event.weight_version is not None]
        yield [
            _label(trace, timeline),
            printable(timeline.worker),
            timeline.phase or "",
            "" if lost else "placed" if timeline.lane is None else printable(timeline.lane),
            "" if lost else f"{timeline.prompt_tokens:,}",
            "" if last is None or last.tokens is None else f"{last.tokens:,}",
            ", ".join(map(str, dict.fromkeys(versions))),
            f"lost: {printable(lost.reason or '')}"
            if lost
            else "in flight"
            if ended is None
            else printable(ended.reason or ""),
        ]


def phase_rows(trace: RequestTrace) -> Iterator[list[str]]:
    """Yield a line for each timeline that a worker reports: its time in each phase."""
    for timeline in trace.timelines:
        if _find(timeline, "lost"):
            continue
        phases = phases_of(timeline)
        seconds = map(_seconds, (phases.queue_s, phases.slot_s, phases.prefill_s, phases.decode_s))
        rate = _rate(_find(timeline, "ended"), phases)
        yield [_label(trace, timeline), timeline.worker, *seconds, _paused(phases), rate]


def event_rows(trace: RequestTrace) -> Iterator[list[str]]:
    """Yield a line for each event of the first `MAX_SHOWN` timelines, with the time since the first event of all."""
    began_at = min((event.at for timeline in trace.timelines for event in timeline.events), default=0.0)
    for timeline in trace.timelines[:MAX_SHOWN]:
        before: float | None = None
        for event in timeline.events:
            took = "" if before is None else _seconds(event.at - before)
            at = _seconds(event.at - began_at)
            yield [_label(trace, timeline), timeline.worker, at, took, printable(event.event), _details(event)]
            before = event.at


def notes(trace: RequestTrace) -> Iterator[str]:
    """Yield a line for each limit of the trace: left out timelines, wrong clocks, workers without an answer."""
    if len(trace.timelines) > MAX_SHOWN:
        yield f"The events of {len(trace.timelines) - MAX_SHOWN} more timelines: --json."
    if trace.left_out:
        yield f"{trace.left_out} earlier timelines did not fit into the answers."
    for worker, seconds in clock_skews(trace.timelines).items():
        side = "ahead of" if seconds > 0 else "behind"
        clock = f"The clock of {worker} is at least {abs(seconds):.3f} s {side} the server's"
        yield f"{clock}: compare times across machines with that in mind."
    yield from silent_lines(trace)


def silent_lines(answers: RequestList) -> Iterator[str]:
    """Yield a line for each worker without an answer."""
    for worker, why in answers.silent.items():
        yield f"No answer from {worker}: {printable(why)}."


def _label(trace: RequestTrace, timeline: WorkerTimeline) -> str:
    """Return the attempt, with the sample and the client if the trace has several of them."""
    label = str(timeline.number)
    if any(other.child for other in trace.timelines):
        label += f" of sample {timeline.child}"
    if len({other.client for other in trace.timelines}) > 1:
        label += f" of {printable(timeline.client)}"
    return label


def _model(timeline: WorkerTimeline) -> str:
    adapter = "" if timeline.lora is None else f" with adapter {printable(timeline.lora)}"
    return f"model {printable(timeline.model)}{adapter}"


def _find(timeline: WorkerTimeline, name: str) -> TimelineEvent | None:
    return next((event for event in timeline.events if event.event == name), None)


def _details(event: TimelineEvent) -> str:
    parts = []
    if event.weight_version is not None:
        parts.append(f"version {event.weight_version}")
    if event.tokens is not None:
        parts.append(f"{event.tokens:,} tokens")
    if event.cached_tokens is not None:
        parts.append(f"{event.cached_tokens:,} cached")
    if event.reason is not None:
        parts.append(printable(event.reason))
    return ", ".join(parts)


def _paused(phases: Phases) -> str:
    if any(pause.seconds is None for pause in phases.pauses):
        return "now"
    return _seconds(sum(pause.seconds or 0.0 for pause in phases.pauses)) if phases.pauses else ""


def _rate(ended: TimelineEvent | None, phases: Phases) -> str:
    if ended is None or not ended.tokens or not phases.decode_s or phases.decode_s <= 0:
        return ""
    return f"{(ended.tokens - 1) / phases.decode_s:,.1f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
