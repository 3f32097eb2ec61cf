"""What several workers tell of one request, put together. Plain values, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from ....schemas import limits
from ....schemas.acks import Ack
from ....schemas.telemetry import RequestTimeline, TimelineEvent
from ..fleet.command_result import CommandResult

__all__ = ["Phases", "RequestPause", "RequestTrace", "WorkerTimeline", "clock_skews", "merge_timelines", "phases_of"]

MAX_MERGED: Final = limits.MAX_N * limits.MAX_ATTEMPTS
"""As many timelines as a request can have: workers that are well tell of no more."""
MIN_SKEW_S: Final = 0.01
"""Clocks that differ by less are taken for equal: well kept ones differ by some milliseconds."""


class WorkerTimeline(RequestTimeline, frozen=True, kw_only=True, omit_defaults=False):
    """One attempt of one sample of a request, and the worker that tells of it."""

    worker: str
    """Its id."""
    incarnation: str
    """Of the worker now: it may have been fenced since, and have gone on as another."""


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request, as far as the workers that answered remember it."""

    request_id: str
    """As its client named it."""
    timelines: tuple[WorkerTimeline, ...] = ()
    """Those of one client and sample together, in the order of their attempts; empty: no worker remembers it."""
    workers_asked: int = 0
    """Live workers that know how to answer."""
    workers_answered: int = 0
    """Of these, those that did in time."""
    silent: dict[str, str] = {}
    """Live workers without an answer, and why: what they had to do with the request is not known."""
    left_out: int = 0
    """Earlier timelines, for which the answers had no room."""


def merge_timelines(request_id: str, result: CommandResult) -> RequestTrace:
    """Put the answers to `read_request` together; workers that have not answered are named.

    Args:
        result: of the command, in which no worker needs to have answered.
    """
    acks = result.applied.values()
    found = sorted((each for ack in acks for each in _of_worker(ack)), key=_order)
    refused = [*result.failed.items(), *result.unsupported.items(), *result.stale.items(), *result.late.items()]
    silent = {worker: _why(ack) for worker, ack in refused} | result.missing
    return RequestTrace(
        request_id=request_id,
        timelines=tuple(found[:MAX_MERGED]),
        workers_asked=len(result.applied) + len(silent),
        workers_answered=len(result.applied),
        silent=dict(sorted(silent.items())),
        left_out=sum(ack.timelines_left_out for ack in acks) + len(found[MAX_MERGED:]),
    )


def _why(ack: Ack) -> str:
    return "it did not answer in time" if ack.error is None else ack.error.message


def _of_worker(ack: Ack) -> Iterable[WorkerTimeline]:
    for timeline in ack.timelines or ():
        fields = msgspec.structs.asdict(timeline)
        yield WorkerTimeline(**fields, worker=ack.worker, incarnation=ack.incarnation)


def _order(timeline: WorkerTimeline) -> tuple[str, int, int, float, str]:
    # A prefill and a decode phase are one attempt; both were published at once, and came to their workers in turn.
    came_at = next((event.at for event in timeline.events if event.event != "published"), 0.0)
    return timeline.client, timeline.child, timeline.attempt, came_at, timeline.worker


@dataclass(frozen=True, slots=True)
class RequestPause:
    """A time in which a request stood still."""

    at: float
    seconds: float | None
    """None: it stands still now."""
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Where the time of one attempt went, in seconds; None: it did not come so far, or the worker has left it out."""

    queue_s: float | None
    """From the queue to the worker, by the clocks of both machines: below 0 where these differ."""
    slot_s: float | None
    """From the offer to the engine: long for a request that follows others of its group."""
    prefill_s: float | None
    """In the engine, until the prompt was computed."""
    decode_s: float | None
    """From the first token to the end, without pauses."""
    pauses: tuple[RequestPause, ...]


def phases_of(timeline: RequestTimeline) -> Phases:
    """Say where the time of an attempt went."""
    first: dict[str, float] = {}
    for event in timeline.events:
        first.setdefault(event.event, event.at)
    pauses = tuple(_pauses(timeline.events))
    decode_s = _between(first, "first_token", "ended")
    if decode_s is not None:
        decode_s -= sum(pause.seconds or 0.0 for pause in pauses if pause.at >= first["first_token"])
    return Phases(
        queue_s=_between(first, "published", "offered"),
        slot_s=_between(first, "offered", "started"),
        prefill_s=_between(first, "started", "prefilled"),
        decode_s=decode_s,
        pauses=pauses,
    )


def _between(first: dict[str, float], begin: str, end: str) -> float | None:
    return first[end] - first[begin] if begin in first and end in first else None


def _pauses(events: Iterable[TimelineEvent]) -> Iterable[RequestPause]:
    held: TimelineEvent | None = None
    for event in events:
        if event.event == "held":
            held = event
        elif event.event in ("resumed", "ended") and held is not None:
            yield RequestPause(held.at, event.at - held.at, held.reason)
            held = None
    if held is not None:
        yield RequestPause(held.at, None, held.reason)


def clock_skews(timelines: Iterable[WorkerTimeline]) -> dict[str, float]:
    """Return by how many seconds workers' clocks are at least ahead of the server's, or behind it (below 0).

    A worker cannot admit a request before it was published, nor after the next attempt of it was.
    """
    skews: dict[str, float] = {}
    published: dict[tuple[str, int, int], float] = {}
    everything = list(timelines)
    for timeline in everything:
        for event in timeline.events:
            if event.event == "published":
                published[timeline.client, timeline.child, timeline.attempt] = event.at
    for timeline in everything:
        admitted_at = next((event.at for event in timeline.events if event.event == "offered"), None)
        if admitted_at is None:
            continue
        before = published.get((timeline.client, timeline.child, timeline.attempt))
        after = published.get((timeline.client, timeline.child, timeline.attempt + 1))
        if before is not None and admitted_at < before - MIN_SKEW_S:
            skews[timeline.worker] = min(admitted_at - before, skews.get(timeline.worker, 0.0))
        elif after is not None and after != before and admitted_at > after + MIN_SKEW_S:
            skews[timeline.worker] = max(admitted_at - after, skews.get(timeline.worker, 0.0))
    return skews
