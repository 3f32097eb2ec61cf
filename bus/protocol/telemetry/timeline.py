"""Timelines of the requests of one worker: those in flight, and the last that ended. The caller passes in the clocks.

A timeline gets an event when its request changes (offered, started, held, ended ...), and none for a token. So a
request costs a few microseconds, regardless of its length.

Invariants: a timeline is in flight from its begin until its end, which happens once. The book keeps `MAX_ENDED` ended
timelines, and as many of requests that were never offered. The oldest are removed first. A timeline keeps at most
`MAX_TIMELINE_EVENTS` events. So memory is bounded: about 1 KB for each timeline, and 10 KB at most.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, Literal

from ....schemas.chunk import FinishReason
from ....schemas.limits import MAX_TIMELINE_EVENTS, MAX_TIMELINES
from ....schemas.messages import RequestKey
from ....schemas.request_ids import wire_id
from ....schemas.telemetry import (
    LostAttempt,
    RequestKind,
    RequestProgress,
    RequestTimeline,
    TimelineEvent,
    TimelineEventName,
)
from ..attempt.states import PASSED_ON, RETRIED

__all__ = ["MAX_ENDED", "RETURNED", "OpenTimeline", "TimelineBook"]

MAX_ENDED: Final = 1000
"""Ended requests that a worker remembers: those of the last minutes, as a worker ends a few per second."""
RETURNED: Final = "returned"
"""The end reason of a timeline if the worker has returned the request to the queue."""
_NOT_FAILED: Final = frozenset({RETURNED, *PASSED_ON, *RETRIED, *FinishReason} - {FinishReason.ERROR})
"""End reasons of a request that finished, or that the client or the queue sends to a worker again."""
_NUM_FIRST: Final = MAX_TIMELINE_EVENTS // 2
"""Number of first events that are always kept. Of the later events, only the last are kept."""


class OpenTimeline:
    """The events so far of one attempt of one sample of a request.

    Args:
        serial: the number of the timeline at this worker.
        clock: seconds that never go back, for durations.
        wall: the present Unix time in seconds.
    """

    __slots__ = (
        "_clock", "_offset_s", "alias", "attempt", "child", "client", "events", "given_id", "is_held", "is_offered",
        "lane", "lora", "lost", "phase", "prompt_tokens", "request_id", "serial", "traceparent", "weight_version",
    )  # fmt: skip

    def __init__(
        self, serial: int, client: str, key: RequestKey, lane: str | None, clock: Callable[[], float], wall: float
    ) -> None:
        self.given_id = ""
        self.alias: str | None = None
        self._clock = clock
        self._offset_s = wall - clock()
        self.serial = serial
        self.client, self.lane = client, lane
        self.request_id, self.attempt, self.child = key.request_id, key.attempt, key.child
        self.phase: Literal["prefill", "decode"] | None = None
        self.lost: tuple[LostAttempt, ...] = ()
        self.prompt_tokens = 0
        self.traceparent: str | None = None
        self.lora: str | None = None
        self.weight_version = 0
        self.is_offered = self.is_held = False
        self.events: list[TimelineEvent] = []

    def __repr__(self) -> str:
        """Return one line with the last event."""
        last = self.events[-1].event if self.events else None
        return f"<OpenTimeline {self.request_id} attempt={self.attempt} child={self.child} last={last}>"

    def add(
        self,
        event: TimelineEventName,
        *,
        tokens: int | None = None,
        cached_tokens: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Add an event at the present time."""
        happened = TimelineEvent(at=self._now(), event=event, tokens=tokens, cached_tokens=cached_tokens, reason=reason)
        self._add(happened)

    def offer(self, weight_version: int, prompt_tokens: int, traceparent: str | None, lora: str | None = None) -> None:
        """Record that the worker has admitted the request."""
        self.is_offered, self.lora = True, lora
        self.weight_version, self.prompt_tokens, self.traceparent = weight_version, prompt_tokens, traceparent
        self._add(TimelineEvent(at=self._now(), event="offered", weight_version=weight_version))

    def begin_version(self, weight_version: int, tokens: int) -> None:
        """Record that tokens of another weight version begin after `tokens` tokens."""
        self.weight_version = weight_version
        self._add(TimelineEvent(at=self._now(), event="weights", weight_version=weight_version, tokens=tokens))

    def hold(self, reason: str, tokens: int) -> None:
        """Record that a pause holds the request. This has no effect if the request is already held."""
        if not self.is_held:
            self.is_held = True
            self.add("held", tokens=tokens, reason=reason)

    def resume(self) -> None:
        """Record that the request resumes. This has no effect if the request is not held."""
        if self.is_held:
            self.is_held = False
            self.add("resumed")

    def add_published(self, at: float) -> None:
        """Record that the queue has stored the request at `at`, by the server's clock."""
        self._add(TimelineEvent(at=at, event="published"))

    def _now(self) -> float:
        return self._offset_s + self._clock()

    def _add(self, event: TimelineEvent) -> None:
        if len(self.events) >= MAX_TIMELINE_EVENTS:
            del self.events[_NUM_FIRST]
        self.events.append(event)

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the end, or until now."""
        return max(self._ended_at() - self.events[0].at, 0.0) if self.events else 0.0

    @property
    def has_failed(self) -> bool:
        """True if the request ended with an error that its client does not retry."""
        last = self.events[-1] if self.events else None
        return last is not None and last.event == "ended" and last.reason not in _NOT_FAILED

    def _ended_at(self) -> float:
        last = self.events[-1]
        return last.at if last.event == "ended" else self._now()

    def export(self, progress: RequestProgress | None = None) -> RequestTimeline:
        """Return the events so far in wire format."""
        return RequestTimeline(
            request_id=self.request_id,
            given_id=self.given_id,
            client=self.client,
            attempt=self.attempt,
            child=self.child,
            lane=self.lane,
            lora=self.lora,
            prompt_tokens=self.prompt_tokens,
            traceparent=self.traceparent,
            events=tuple(self.events),
            phase=self.phase,
            lost=self.lost,
            progress=progress,
        )


ProgressOf = Callable[[OpenTimeline], RequestProgress | None]
"""Returns the progress of a timeline in flight; None: it has ended."""


class TimelineBook:
    """The timelines of one worker.

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

    def begin(
        self,
        client: str,
        key: RequestKey,
        *,
        lane: str | None = None,
        published_at: float | None = None,
        given_id: str = "",
    ) -> OpenTimeline:
        """Begin the timeline of a received request.

        Args:
            lane: lane of the queue; None: the request was placed at this worker.
            published_at: the time at which the queue stored it.
            given_id: the caller's id; empty: it is that of `key`.
        """
        self._num_begun += 1
        timeline = OpenTimeline(self._num_begun, client, key, lane, self._clock, self._wall())
        if given_id:
            timeline.given_id, timeline.alias = given_id, wire_id(given_id)
        if published_at is not None:
            timeline.add_published(published_at)
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
        timeline.add("ended", tokens=tokens, reason=reason)
        if timeline.is_offered:
            self._ended.append(timeline)
        else:
            key = timeline.client, RequestKey(timeline.request_id, timeline.attempt, timeline.child)
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
        found = [each for each in everything if request_id in (each.request_id, each.alias)]
        return _best(found, lambda each: each.serial, client, MAX_TIMELINES, progress_of)

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
            return _best(idle_s, idle_s.__getitem__, client, limit, progress_of)
        if show == "slowest":
            return _best((*ended, *in_flight), lambda each: each.seconds, client, limit, progress_of)
        if show == "failed":
            found = (each for each in (*self._refused.values(), *ended) if each.has_failed)
        else:
            found = (each for each in (*ended, *in_flight) if each.lost)
        return _best(found, lambda each: each.events[-1].at, client, limit, progress_of)


def _best(
    timelines: Iterable[OpenTimeline],
    rank: Callable[[OpenTimeline], float],
    client: str | None,
    limit: int,
    progress_of: ProgressOf,
) -> tuple[list[RequestTimeline], int]:
    found = sorted((each for each in timelines if client in (None, each.client)), key=rank)
    return [each.export(progress_of(each)) for each in found[-limit:]], max(len(found) - limit, 0)
