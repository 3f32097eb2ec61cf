"""What became of the requests of one worker: those in flight, and the last that have ended. Clocks are passed in.

A timeline gets an event where its request changes (offered, started, held, ended ...), and nothing for a token: a
request costs a few microseconds, however long its answer is.

Invariants: a timeline that was begun is in flight until it is ended, once. `MAX_ENDED` of the ended ones are kept, and
as many of requests that were never offered; the oldest go first. A timeline keeps at most `MAX_TIMELINE_EVENTS` events.
So memory is flat: about 1 KB for each timeline, and 10 KB at most.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from ....schemas.limits import MAX_TIMELINE_EVENTS, MAX_TIMELINES
from ....schemas.messages import RequestKey
from ....schemas.telemetry import RequestTimeline, TimelineEvent, TimelineEventName

__all__ = ["MAX_ENDED", "RETURNED", "OpenTimeline", "TimelineBook"]

MAX_ENDED: Final = 1000
"""Ended requests that a worker remembers: those of its last minutes, as it ends a few in a second."""
RETURNED: Final = "returned"
"""The reason of an end at a worker that has given the request back to the queue."""
_NUM_FIRST: Final = MAX_TIMELINE_EVENTS // 2
"""Events that stay for good; of those behind them, the last are kept."""


class OpenTimeline:
    """What has happened so far to one attempt of one sample of a request.

    Args:
        serial: counts the timelines of a worker.
        clock: seconds that never go back; durations are by it.
        wall: Unix time in seconds, now.
    """

    __slots__ = (
        "_clock", "_offset_s", "attempt", "child", "client", "events", "is_held", "is_offered", "lane",
        "prompt_tokens", "request_id", "serial", "traceparent", "weight_version",
    )  # fmt: skip

    def __init__(
        self, serial: int, client: str, key: RequestKey, lane: str | None, clock: Callable[[], float], wall: float
    ) -> None:
        self._clock = clock
        self._offset_s = wall - clock()
        self.serial = serial
        self.client, self.lane = client, lane
        self.request_id, self.attempt, self.child = key.request_id, key.attempt, key.child
        self.prompt_tokens = 0
        self.traceparent: str | None = None
        self.weight_version = 0
        self.is_offered = self.is_held = False
        self.events: list[TimelineEvent] = []

    def __repr__(self) -> str:
        """One line with the last event."""
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
        """Add an event of now."""
        happened = TimelineEvent(at=self._now(), event=event, tokens=tokens, cached_tokens=cached_tokens, reason=reason)
        self._add(happened)

    def offer(self, weight_version: int, prompt_tokens: int, traceparent: str | None) -> None:
        """The worker has admitted the request."""
        self.is_offered = True
        self.weight_version, self.prompt_tokens, self.traceparent = weight_version, prompt_tokens, traceparent
        self._add(TimelineEvent(at=self._now(), event="offered", weight_version=weight_version))

    def begin_version(self, weight_version: int, tokens: int) -> None:
        """Tokens of other weights than before begin, after so many tokens."""
        self.weight_version = weight_version
        self._add(TimelineEvent(at=self._now(), event="weights", weight_version=weight_version, tokens=tokens))

    def hold(self, reason: str, tokens: int) -> None:
        """The request stands still, for a pause; without effect on one that does."""
        if not self.is_held:
            self.is_held = True
            self.add("held", tokens=tokens, reason=reason)

    def resume(self) -> None:
        """The request goes on; without effect on one that does."""
        if self.is_held:
            self.is_held = False
            self.add("resumed")

    def add_published(self, at: float) -> None:
        """The queue has had the request since `at`, by the server's clock."""
        self._add(TimelineEvent(at=at, event="published"))

    def _now(self) -> float:
        return self._offset_s + self._clock()

    def _add(self, event: TimelineEvent) -> None:
        if len(self.events) >= MAX_TIMELINE_EVENTS:
            del self.events[_NUM_FIRST]
        self.events.append(event)

    def export(self) -> RequestTimeline:
        """Return what has happened so far, as it crosses the wire."""
        return RequestTimeline(
            request_id=self.request_id,
            client=self.client,
            attempt=self.attempt,
            child=self.child,
            lane=self.lane,
            prompt_tokens=self.prompt_tokens,
            traceparent=self.traceparent,
            events=tuple(self.events),
        )


class TimelineBook:
    """The timelines of one worker.

    Args:
        clock: seconds that never go back.
        wall: Unix time in seconds.

    Attributes:
        on_ended: called with each timeline that has ended, at once; must not block. None: nothing is called.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._num_begun = 0
        self._in_flight: set[OpenTimeline] = set()
        self._ended: deque[OpenTimeline] = deque(maxlen=MAX_ENDED)
        # Never offered: the last word on each attempt, as the queue hands a request out again and again.
        self._refused: OrderedDict[tuple[str, RequestKey], OpenTimeline] = OrderedDict()
        self.on_ended: Callable[[RequestTimeline], None] | None = None

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<TimelineBook in_flight={len(self._in_flight)} ended={len(self._ended)} refused={len(self._refused)}>"

    def begin(
        self, client: str, key: RequestKey, *, lane: str | None = None, published_at: float | None = None
    ) -> OpenTimeline:
        """Begin the timeline of a request that has come here.

        Args:
            lane: of the queue; None: the request was placed at this worker.
            published_at: since when the queue has had it.
        """
        self._num_begun += 1
        timeline = OpenTimeline(self._num_begun, client, key, lane, self._clock, self._wall())
        if published_at is not None:
            timeline.add_published(published_at)
        self._in_flight.add(timeline)
        return timeline

    def end(self, timeline: OpenTimeline, reason: str, tokens: int) -> None:
        """End a timeline; without effect on one that has ended.

        Args:
            reason: the finish reason, the error's code, or `RETURNED`.
            tokens: generated.
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

    def find(self, request_id: str) -> tuple[list[RequestTimeline], int]:
        """Return the timelines of a request, of whichever client, in the order in which they came.

        At most `MAX_TIMELINES`, the latest; the number says how many earlier ones were left out.
        """
        everything = (*self._refused.values(), *self._ended, *self._in_flight)
        found = [timeline for timeline in everything if timeline.request_id == request_id]
        found.sort(key=lambda timeline: timeline.serial)
        shown = found[-MAX_TIMELINES:]
        return [timeline.export() for timeline in shown], len(found) - len(shown)
