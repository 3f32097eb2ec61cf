"""The timelines of requests: at the worker that records them, and merged from several workers for their reader.

A timeline gets an event when its request changes (offered, started, held, ended ...), and none for a token. So a
request costs a few microseconds, regardless of its length.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ....schemas import limits
from ....schemas.acks import Ack
from ....schemas.chunk import FinishReason
from ....schemas.errors import ErrorCode
from ....schemas.limits import MAX_TIMELINE_EVENTS, MAX_TIMELINES
from ....schemas.messages import RequestKey
from ....schemas.request import wire_id
from ....schemas.telemetry import RequestKind, RequestProgress, RequestTimeline, TimelineEvent, TimelineEventName
from ..attempt.machine import PASSED_ON
from ..fleet.command_result import CommandResult

MAX_MERGED: Final = limits.MAX_N * limits.MAX_ATTEMPTS
"""The maximum number of timelines of a request. Workers without a fault never report more."""
MIN_SKEW_S: Final = 0.01
"""Seconds below which a difference of clocks counts as zero, because synchronized clocks differ by some
milliseconds."""
MAX_ENDED: Final = 1000
"""Ended requests that a worker remembers: those of the last minutes, as a worker ends a few per second."""
RETURNED: Final = "returned"
"""The end reason of a timeline if the worker has returned the request to the queue."""
_RESUMED: Final = frozenset(code for code in ErrorCode if code.facts.resumed)
_NOT_FAILED: Final = frozenset({RETURNED, *PASSED_ON, *_RESUMED, *FinishReason} - {FinishReason.ERROR})
"""End reasons of a request that finished, or that the client or the queue sends to a worker again."""
_EVENT_FIELDS: Final = ("at", "event", "tokens", "cached_tokens", "reason", "weight_version")
_NUM_FIRST: Final = MAX_TIMELINE_EVENTS // 2
"""Number of first events that are always kept. Of the later events, only the last are kept."""


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
    reported = [each for ack in result.applied.values() for each in _read_timelines(ack)]
    return RequestList(**_merge(sorted(reported, key=lambda each: _rank_timeline(show, each)), limit, result))


def _rank_timeline(show: RequestKind, timeline: WorkerTimeline) -> tuple[float, str, str]:
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
    reported = [each for ack in result.applied.values() for each in _read_timelines(ack)]
    found = sorted([*reported, *_find_lost_attempts(reported)], key=_sort_key)
    return RequestTrace(request_id=request_id, **_merge(found, MAX_MERGED, result))


def _merge(found: Sequence[WorkerTimeline], limit: int, result: CommandResult) -> dict[str, Any]:
    refused = [*result.failed.items(), *result.unsupported.items(), *result.stale.items(), *result.late.items()]
    late = "it did not answer in time"
    silent = {worker: ack.error.message if ack.error else late for worker, ack in refused} | result.missing
    return {
        "timelines": tuple(found[:limit]),
        "workers_asked": len(result.applied) + len(silent),
        "workers_answered": len(result.applied),
        "silent": dict(sorted(silent.items())),
        "left_out": sum(ack.timelines_left_out for ack in result.applied.values()) + len(found[limit:]),
    }


def _read_timelines(ack: Ack) -> Iterable[WorkerTimeline]:
    for timeline in ack.timelines or ():
        fields = msgspec.structs.asdict(timeline)
        fields.update(worker=ack.worker, incarnation=ack.incarnation, model=ack.model)
        yield WorkerTimeline(**fields, number=len(timeline.lost) + 1)


def _find_lost_attempts(reported: Iterable[WorkerTimeline]) -> Iterable[WorkerTimeline]:
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


def _sort_key(timeline: WorkerTimeline) -> tuple[str, int, int, int, float, str]:
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
    pauses = tuple(_find_pauses(timeline.events))
    decode_s = _measure(first, "first_token", "ended")
    if decode_s is not None:
        decode_s -= sum(pause.seconds or 0.0 for pause in pauses if pause.at >= first["first_token"])
    return Phases(
        queue_s=_measure(first, "published", "offered"),
        slot_s=_measure(first, "offered", "started"),
        prefill_s=_measure(first, "started", "prefilled"),
        decode_s=decode_s,
        pauses=pauses,
    )


def _measure(first: dict[str, float], begin: str, end: str) -> float | None:
    return first[end] - first[begin] if begin in first and end in first else None


def _find_pauses(events: Iterable[TimelineEvent]) -> Iterable[RequestPause]:
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


class OpenTimeline:
    """The events so far of one attempt of one sample of a request. They get their wire format when they are read.

    Args:
        serial: the number of the timeline at this worker.
        request: the timeline without events.
        clock: seconds that never go back, for durations.
        wall: the present Unix time in seconds.
        published_at: the time at which the queue stored the request, by the server's clock.
    """

    __slots__ = ("_clock", "_events", "_offered", "_offset_s", "is_held", "request", "serial", "weight_version")

    def __init__(
        self,
        serial: int,
        request: RequestTimeline,
        clock: Callable[[], float],
        wall: float,
        published_at: float | None = None,
    ) -> None:
        self.serial = serial
        self.request = request
        self.weight_version = 0
        self.is_held = False
        # Number of prompt tokens, traceparent and adapter.
        self._offered: tuple[int, str | None, str | None] | None = None
        # The fields of each event, in the order of `_EVENT_FIELDS`. Those at the end may be missing.
        self._events: list[tuple[Any, ...]] = [] if published_at is None else [(published_at, "published")]
        self._clock = clock
        self._offset_s = wall - clock()

    @property
    def is_offered(self) -> bool:
        """True if the worker has admitted the request."""
        return self._offered is not None

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, in their wire form, by which a reader may name the request."""
        request = self.request
        return (request.request_id, wire_id(request.given_id)) if request.given_id else (request.request_id,)

    def add(self, event: TimelineEventName, *values: int | str | None) -> None:
        """Add an event at the present time. `values` are its next fields, in the order of `TimelineEvent`."""
        events = self._events
        if len(events) >= MAX_TIMELINE_EVENTS:
            del events[_NUM_FIRST]
        events.append((self._offset_s + self._clock(), event, *values))

    def offer(self, weight_version: int, prompt_tokens: int, traceparent: str | None, lora: str | None = None) -> None:
        """Record that the worker has admitted the request."""
        self.weight_version, self._offered = weight_version, (prompt_tokens, traceparent, lora)
        self.add("offered", None, None, None, weight_version)

    def begin_version(self, weight_version: int, tokens: int) -> None:
        """Record that tokens of another weight version begin after `tokens` tokens."""
        self.weight_version = weight_version
        self.add("weights", tokens, None, None, weight_version)

    def hold(self, reason: str, tokens: int) -> None:
        """Record that a pause holds the request. This has no effect if the request is already held."""
        if not self.is_held:
            self.is_held = True
            self.add("held", tokens, None, reason)

    def resume(self) -> None:
        """Record that the request resumes. This has no effect if the request is not held."""
        if self.is_held:
            self.is_held = False
            self.add("resumed")

    @property
    def last_at(self) -> float:
        """Unix time of the last event."""
        return float(self._events[-1][0])

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the end, or until now."""
        if not self._events:
            return 0.0
        ended_at = self.last_at if self.has_ended else self._offset_s + self._clock()
        return max(ended_at - float(self._events[0][0]), 0.0)

    @property
    def has_ended(self) -> bool:
        """True if the last event is the end."""
        return bool(self._events) and self._events[-1][1] == "ended"

    @property
    def has_failed(self) -> bool:
        """True if the request ended with an error that its client does not retry."""
        return self.has_ended and self._make_event(self._events[-1]).reason not in _NOT_FAILED

    @staticmethod
    def _make_event(event: tuple[Any, ...]) -> TimelineEvent:
        return TimelineEvent(**dict(zip(_EVENT_FIELDS, event, strict=False)))

    def export(self, progress: RequestProgress | None = None) -> RequestTimeline:
        """Return the events so far in wire format."""
        request = self.request
        if self._offered is not None:
            prompt_tokens, traceparent, lora = self._offered
            request = replace(request, prompt_tokens=prompt_tokens, traceparent=traceparent, lora=lora)
        return replace(request, events=tuple(map(self._make_event, self._events)), progress=progress)


ProgressOf = Callable[[OpenTimeline], RequestProgress | None]
"""Returns the progress of a timeline in flight; None: it has ended."""


class TimelineBook:
    """The timelines of one worker.

    It has the timelines in flight and the last that ended. The caller passes in the clocks.

    Invariants: a timeline is in flight from its begin until its end, which happens once. The book keeps `MAX_ENDED`
    ended timelines, and as many of requests that were never offered. The oldest are removed first. A timeline keeps at
    most `MAX_TIMELINE_EVENTS` events. So memory is bounded: about 1 KB for each timeline, and 10 KB at most.

    Args:
        clock: seconds that never go back.
        wall: Unix time in seconds.

    Attributes:
        on_ended: called immediately with each ended timeline; must not block. None: nothing is called.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._num_begun = 0
        self._in_flight: set[OpenTimeline] = set()
        self._ended: deque[OpenTimeline] = deque(maxlen=MAX_ENDED)
        # Timelines of requests that were never offered. Only the last timeline of each attempt stays, because the queue
        # delivers a request repeatedly.
        self._refused: OrderedDict[tuple[str, RequestKey], OpenTimeline] = OrderedDict()
        self.on_ended: Callable[[RequestTimeline], None] | None = None

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<TimelineBook in_flight={len(self._in_flight)} ended={len(self._ended)} refused={len(self._refused)}>"

    def begin(self, request: RequestTimeline, published_at: float | None = None) -> OpenTimeline:
        """Begin the timeline of a received request.

        Args:
            request: the timeline without events.
            published_at: the time at which the queue stored it.
        """
        self._num_begun += 1
        timeline = OpenTimeline(self._num_begun, request, self._clock, self._wall(), published_at)
        self._in_flight.add(timeline)
        return timeline

    def end(self, timeline: OpenTimeline, reason: str, tokens: int) -> None:
        """End a timeline. This has no effect if the timeline has ended.

        Args:
            reason: the finish reason, the error code, or `RETURNED`.
            tokens: the number of generated tokens.
        """
        if timeline not in self._in_flight:
            return
        self._in_flight.discard(timeline)
        timeline.add("ended", tokens, None, reason)
        if timeline.is_offered:
            self._ended.append(timeline)
        else:
            request = timeline.request
            key = request.client, RequestKey(request.request_id, request.attempt, request.child)
            self._refused[key] = timeline
            self._refused.move_to_end(key)
            if len(self._refused) > MAX_ENDED:
                self._refused.popitem(last=False)
        if self.on_ended is not None:
            self.on_ended(timeline.export())

    def find(
        self, request_id: str, client: str | None = None, progress_of: ProgressOf = lambda _: None
    ) -> tuple[list[RequestTimeline], int]:
        """Return the timelines of a request, by either of its ids, in the order in which they began.

        At most the latest `MAX_TIMELINES` are returned, with the number of earlier ones that were left out.

        Args:
            client: name of its client; None: of any client.
            progress_of: returns the progress of a timeline in flight.
        """
        everything = (*self._refused.values(), *self._ended, *self._in_flight)
        found = [each for each in everything if request_id in each.ids]
        return _pick_best(found, lambda each: each.serial, client, MAX_TIMELINES, progress_of)

    def list_of(
        self, show: RequestKind, client: str | None, limit: int, progress_of: ProgressOf
    ) -> tuple[list[RequestTimeline], int]:
        """Return the first `limit` timelines of a list, the first one last, and the number of those left out.

        Args:
            client: only requests of this client; None: of any client.
            progress_of: as in `find`.
        """
        ended, in_flight = self._ended, self._in_flight
        found: Iterable[OpenTimeline]
        if show == "running":
            idle_s = {each: progress.idle_s for each in in_flight if (progress := progress_of(each)) is not None}
            return _pick_best(idle_s, idle_s.__getitem__, client, limit, progress_of)
        if show == "slowest":
            return _pick_best((*ended, *in_flight), lambda each: each.seconds, client, limit, progress_of)
        if show == "failed":
            found = (each for each in (*self._refused.values(), *ended) if each.has_failed)
        else:
            found = (each for each in (*ended, *in_flight) if each.request.lost)
        return _pick_best(found, lambda each: each.last_at, client, limit, progress_of)


def _pick_best(
    timelines: Iterable[OpenTimeline],
    rank: Callable[[OpenTimeline], float],
    client: str | None,
    limit: int,
    progress_of: ProgressOf,
) -> tuple[list[RequestTimeline], int]:
    found = sorted((each for each in timelines if client in (None, each.request.client)), key=rank)
    return [each.export(progress_of(each)) for each in found[-limit:]], max(len(found) - limit, 0)
