"""Merges the timelines of one request from several workers. Plain values, no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ....schemas import limits
from ....schemas.acks import Ack
from ....schemas.telemetry import RequestKind, RequestTimeline, TimelineEvent
from ..fleet.command_result import CommandResult

__all__ = [
    "Phases",
    "RequestList",
    "RequestPause",
    "RequestTrace",
    "WorkerTimeline",
    "clock_skews",
    "merge_list",
    "merge_timelines",
    "phases_of",
    "seconds_of",
]

MAX_MERGED: Final = limits.MAX_N * limits.MAX_ATTEMPTS
"""The maximum number of timelines of a request. Workers without a fault never report more."""
MIN_SKEW_S: Final = 0.01
"""Seconds below which a difference of clocks counts as zero, because synchronized clocks differ by some
milliseconds."""


class WorkerTimeline(RequestTimeline, frozen=True, kw_only=True, omit_defaults=False):
    """One attempt of one sample of a request, or one phase of it, and the worker that reports it.

    An attempt that was lost with its worker is reported by the worker of a later attempt, with the one event `lost`.
    """

    worker: str
    """The id of the worker that had the attempt; empty if no worker had accepted it."""
    incarnation: str
    """The worker's present incarnation. After a fence it may differ from that of the attempt. Empty: the attempt was
    lost with its worker."""
    model: str
    """The worker's model."""
    number: int = 1
    """Number of the attempt as `Generation.attempts` counts: 1 for the first, and the same for both of its phases.
    Publications that no worker accepted do not count."""


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a list, as far as the workers that answered remember them."""

    timelines: tuple[WorkerTimeline, ...] = ()
    """The attempts in the order of the list. In a `RequestTrace`, they are sorted by client, sample and attempt; none:
    no worker remembers the request."""
    workers_asked: int = 0
    """Live workers that support the command."""
    workers_answered: int = 0
    """Of these workers, those that answered in time."""
    silent: dict[str, str] = {}
    """Live workers without an answer, each with the reason. Their part in the request is not known."""
    left_out: int = 0
    """Timelines that did not fit into the answers."""


class RequestTrace(RequestList, frozen=True, kw_only=True):
    """The history of a request, as far as the workers that answered remember it."""

    request_id: str
    """The request id that its client set."""


def merge_list(show: RequestKind, limit: int, result: CommandResult) -> RequestList:
    """Merge the answers of the workers to the `read_request` of a list."""
    reported = [each for ack in result.applied.values() for each in _of_worker(ack)]
    return RequestList(**_merged(sorted(reported, key=lambda each: _rank(show, each)), limit, result))


def _rank(show: RequestKind, timeline: WorkerTimeline) -> tuple[float, str, str]:
    if show == "running":
        first = -timeline.progress.idle_s if timeline.progress else 0.0
    elif show == "slowest":
        first = -(seconds_of(timeline) or 0.0)
    else:
        first = -timeline.events[-1].at if timeline.events else 0.0
    return first, timeline.worker, timeline.request_id


def seconds_of(timeline: RequestTimeline) -> float | None:
    """Return the seconds of an attempt from its first event to its end, or until now. None: they are not known."""
    if timeline.progress is not None:
        return timeline.progress.seconds
    return max(timeline.events[-1].at - timeline.events[0].at, 0.0) if timeline.events else None


def merge_timelines(request_id: str, result: CommandResult) -> RequestTrace:
    """Merge the answers to `read_request`. Name the workers without an answer.

    Args:
        result: result of the command; it may have no answers.
    """
    reported = [each for ack in result.applied.values() for each in _of_worker(ack)]
    found = sorted([*reported, *_lost_attempts(reported)], key=_order)
    return RequestTrace(request_id=request_id, **_merged(found, MAX_MERGED, result))


def _merged(found: Sequence[WorkerTimeline], limit: int, result: CommandResult) -> dict[str, Any]:
    refused = [*result.failed.items(), *result.unsupported.items(), *result.stale.items(), *result.late.items()]
    silent = {worker: _why(ack) for worker, ack in refused} | result.missing
    return {
        "timelines": tuple(found[:limit]),
        "workers_asked": len(result.applied) + len(silent),
        "workers_answered": len(result.applied),
        "silent": dict(sorted(silent.items())),
        "left_out": sum(ack.timelines_left_out for ack in result.applied.values()) + len(found[limit:]),
    }


def _why(ack: Ack) -> str:
    return "it did not answer in time" if ack.error is None else ack.error.message


def _of_worker(ack: Ack) -> Iterable[WorkerTimeline]:
    for timeline in ack.timelines or ():
        fields = msgspec.structs.asdict(timeline)
        fields.update(worker=ack.worker, incarnation=ack.incarnation, model=ack.model)
        yield WorkerTimeline(**fields, number=len(timeline.lost) + 1)


def _lost_attempts(reported: Iterable[WorkerTimeline]) -> Iterable[WorkerTimeline]:
    """Return the lost attempts that no worker reports: usually their worker was killed."""
    known = {(each.client, each.child, each.number, each.worker) for each in reported}
    for timeline in reported:
        for index, lost in enumerate(timeline.lost):
            key = timeline.client, timeline.child, index + 1, lost.worker
            if key not in known:
                known.add(key)
                event = TimelineEvent(at=lost.at, event="lost", tokens=lost.tokens, reason=lost.reason)
                yield WorkerTimeline(
                    request_id=timeline.request_id,
                    client=timeline.client,
                    child=timeline.child,
                    attempt=lost.attempt,
                    worker=lost.worker,
                    incarnation="",
                    model=timeline.model,
                    lora=timeline.lora,
                    events=(event,),
                    lost=timeline.lost[:index],
                    number=index + 1,
                )


def _order(timeline: WorkerTimeline) -> tuple[str, int, int, int, float, str]:
    came_at = next((event.at for event in timeline.events if event.event != "published"), 0.0)
    return timeline.client, timeline.child, timeline.number, timeline.attempt, came_at, timeline.worker


@dataclass(frozen=True, slots=True)
class RequestPause:
    """A time in which a request was paused."""

    at: float
    seconds: float | None
    """Seconds of the pause. None: the request is still paused."""
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The phases of one attempt in seconds.

    None: the attempt did not reach the phase, or the worker left its event out.
    """

    queue_s: float | None
    """From the queue to the worker, by the clocks of both machines: below 0 if the clocks differ."""
    slot_s: float | None
    """From the offer to the engine. This is long for a request that follows others of its group."""
    prefill_s: float | None
    """In the engine, until the prompt was computed."""
    decode_s: float | None
    """From the first token to the end, without pauses."""
    pauses: tuple[RequestPause, ...]


def phases_of(timeline: RequestTimeline) -> Phases:
    """Return the phases of an attempt."""
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
    """Return the minimum number of seconds by which workers' clocks are ahead of the server's, or behind it (below 0).

    A worker cannot admit a request before its publication, or after the publication of the next attempt.
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
