"""A worker's book of timelines: the content of each timeline, and the limits of the book."""

from typing import Any

import pytest

from rollbus.bus.protocol.telemetry.requests import MAX_ENDED, RETURNED, OpenTimeline, TimelineBook
from rollbus.schemas.limits import MAX_TIMELINE_EVENTS, MAX_TIMELINES
from rollbus.schemas.telemetry import LostAttempt, RequestKind, RequestProgress, RequestTimeline, TimelineEvent

WALL = 1_700_000_000.0


class Clock:
    """A clock that a test advances. Its wall time may also jump."""

    def __init__(self) -> None:
        self.now = 100.0
        self.jumped_s = 0.0

    def monotonic(self) -> float:
        """Return the seconds since the start of the machine."""
        return self.now

    def wall(self) -> float:
        """Return the Unix time in seconds."""
        return WALL + self.now - 100.0 + self.jumped_s


@pytest.fixture
def clock() -> Clock:
    """A clock at `WALL`."""
    return Clock()


@pytest.fixture
def book(clock: Clock) -> TimelineBook:
    """An empty book on that clock."""
    return TimelineBook(clock.monotonic, clock.wall)


def offered(book: TimelineBook, request_id: str, **fields: Any) -> OpenTimeline:
    """Begin the timeline of an accepted request."""
    request = RequestTimeline(request_id=request_id, client="alice", lane="normal", **fields)
    timeline = book.begin(request, published_at=WALL - 2)
    timeline.offer(3, 10, "00-trace")
    return timeline


def names(timeline: RequestTimeline) -> list[str]:
    """Return the names of a timeline's events."""
    return [event.event for event in timeline.events]


def test_a_timeline_contains_all_events_of_a_request_in_order(book: TimelineBook, clock: Clock) -> None:
    """A timeline contains all events of a request in order, while the request runs and after it has ended."""
    timeline = offered(book, "r")
    clock.now += 1
    timeline.add("started")
    clock.now += 1
    timeline.add("prefilled", 10, 4)
    timeline.add("first_token")
    [running], _ = book.find("r")
    timeline.begin_version(4, 5)
    book.end(timeline, "stop", 9)

    [ended], left_out = book.find("r")

    assert left_out == 0
    assert names(running) == names(ended)[:-2]
    assert ended == RequestTimeline(
        request_id="r",
        client="alice",
        lane="normal",
        prompt_tokens=10,
        traceparent="00-trace",
        events=(
            TimelineEvent(at=WALL - 2, event="published"),
            TimelineEvent(at=WALL, event="offered", weight_version=3),
            TimelineEvent(at=WALL + 1, event="started"),
            TimelineEvent(at=WALL + 2, event="prefilled", tokens=10, cached_tokens=4),
            TimelineEvent(at=WALL + 2, event="first_token"),
            TimelineEvent(at=WALL + 2, event="weights", weight_version=4, tokens=5),
            TimelineEvent(at=WALL + 2, event="ended", tokens=9, reason="stop"),
        ),
    )


def test_durations_survive_a_jump_of_the_wall_clock(book: TimelineBook, clock: Clock) -> None:
    """A jump of the wall clock by an hour changes no duration of a running request."""
    timeline = offered(book, "r")
    clock.now, clock.jumped_s = clock.now + 1, -3600.0
    timeline.add("started")

    [told], _ = book.find("r")

    assert told.events[-1].at - told.events[-2].at == 1


def test_a_request_is_held_and_resumed_once(book: TimelineBook) -> None:
    """An update under a pause adds no second `held`, and only the first resume adds `resumed`."""
    timeline = offered(book, "r")
    for act in (timeline.resume, lambda: timeline.hold("pause", 3), lambda: timeline.hold("weights", 3)):
        act()
    timeline.resume()
    timeline.resume()

    [told], _ = book.find("r")

    assert [(event.event, event.tokens, event.reason) for event in told.events[2:]] == [
        ("held", 3, "pause"),
        ("resumed", None, None),
    ]


def test_the_middle_of_too_many_events_is_left_out(book: TimelineBook) -> None:
    """If a request has more pauses than fit, the timeline keeps its first and last events."""
    timeline = offered(book, "r")
    for number in range(MAX_TIMELINE_EVENTS):
        timeline.hold(str(number), number)
        timeline.resume()
    book.end(timeline, "stop", 9)

    [told], _ = book.find("r")

    assert len(told.events) == MAX_TIMELINE_EVENTS
    assert names(told)[:3] == ["published", "offered", "held"]
    assert names(told)[-2:] == ["resumed", "ended"]
    assert told.events[-3].reason == str(MAX_TIMELINE_EVENTS - 1)


def test_the_last_thousand_ended_timelines_are_kept(book: TimelineBook) -> None:
    """The 1,001st end removes the first ended timeline. Requests in flight stay, however old they are."""
    running = offered(book, "running")
    for number in range(MAX_ENDED + 1):
        book.end(offered(book, f"r{number}"), "stop", 1)

    assert book.find("r0") == ([], 0)
    assert len(book.find("r1")[0]) == len(book.find(f"r{MAX_ENDED}")[0]) == 1
    assert book.find("running")[0] == [running.export()]


def test_a_request_that_is_returned_repeatedly_has_one_timeline(book: TimelineBook) -> None:
    """A request that the worker returns to the queue repeatedly has one timeline.

    A thousand such requests displace neither served requests nor each other.
    """
    book.end(offered(book, "served"), "stop", 1)
    for _ in range(3):
        for number in range(MAX_ENDED):
            book.end(book.begin(RequestTimeline(request_id=f"r{number}", client="alice")), RETURNED, 0)

    assert len(book.find("served")[0]) == 1
    [told], _ = book.find("r0")
    assert names(told) == ["ended"]

    book.end(book.begin(RequestTimeline(request_id="one more", client="alice")), "queue_full", 0)

    assert book.find("r0") == ([], 0)


def test_attempts_samples_and_clients_have_separate_timelines(book: TimelineBook) -> None:
    """The timelines of one request id are returned in their order of arrival, also those of other clients."""
    for attempt, child in ((0, 1), (0, 0), (1, 1)):
        offered(book, "r", attempt=attempt, child=child)
    book.begin(RequestTimeline(request_id="r", client="bob"))

    found, _ = book.find("r")

    assert [(one.client, one.attempt, one.child) for one in found] == [
        ("alice", 0, 1), ("alice", 0, 0), ("alice", 1, 1), ("bob", 0, 0),
    ]  # fmt: skip


def test_timelines_beyond_the_limit_of_an_answer_are_left_out(book: TimelineBook) -> None:
    """An answer contains the latest timelines and the number of those left out."""
    for child in range(MAX_TIMELINES + 2):
        book.end(offered(book, "r", child=child), "stop", 1)

    found, left_out = book.find("r")

    assert (len(found), left_out) == (MAX_TIMELINES, 2)
    assert found[-1].child == MAX_TIMELINES + 1


def test_the_callback_is_called_once_for_each_end(book: TimelineBook) -> None:
    """The callback is called once for each end, also for rejected requests. A second end of a request has no effect."""
    heard: list[tuple[str, str | None]] = []
    book.on_ended = lambda timeline: heard.append((timeline.request_id, timeline.events[-1].reason))
    timeline = offered(book, "r")
    book.end(timeline, "stop", 1)
    book.end(timeline, "abort", 1)
    book.end(book.begin(RequestTimeline(request_id="refused", client="alice")), "queue_full", 0)

    assert heard == [("r", "stop"), ("refused", "queue_full")]


@pytest.mark.parametrize("name", ["", "r", "x" * 128, "../..", "<script>", "r'; --", "*", "\u202e"])
def test_a_request_id_finds_only_its_own_timelines(book: TimelineBook, name: str) -> None:
    """A request id finds only its own timelines, even if it contains special characters."""
    offered(book, name)
    offered(book, "other")

    assert [timeline.request_id for timeline in book.find(name)[0]] == [name]


def progress(timeline: OpenTimeline) -> RequestProgress | None:
    """Return a progress whose time without a token is the number of the request, or None after its end."""
    if timeline.has_ended:
        return None
    return RequestProgress(seconds=timeline.seconds, idle_s=float(timeline.request.request_id[1:]), tokens=1)


def listed(book: TimelineBook, show: RequestKind, **fields: Any) -> tuple[list[str], int]:
    """Return the ids of a list, the first one last, and the number of requests that were left out."""
    found, left_out = book.list_of(show, fields.get("client"), fields.get("limit", 9), progress)
    return [each.request_id for each in found], left_out


def test_lists_have_their_requests_in_order(book: TimelineBook, clock: Clock) -> None:
    """Each list has its requests in its order. The first ones stay if there are too many, or of one client only."""
    for name in ("r5", "r7", "r6"):
        clock.now += 1
        offered(book, name)
    for name, reason in (("e1", "stop"), ("e2", "invalid_request"), ("e3", "worker_fenced"), ("e4", "expired")):
        ended = offered(book, name, lost=(LostAttempt(worker="gone"),) if name == "e1" else ())
        clock.now += 10 if name == "e3" else 1
        book.end(ended, reason, 1)
    for name, reason in (("e5", RETURNED), ("e6", "queue_full"), ("e7", "unsupported")):
        clock.now += 1
        book.end(book.begin(RequestTimeline(request_id=name, client="bob")), reason, 0)

    assert listed(book, "running") == (["r5", "r6", "r7"], 0)
    assert listed(book, "running", limit=1) == (["r7"], 2)
    assert listed(book, "failed") == (["e2", "e4", "e7"], 0)
    assert listed(book, "failed", client="bob") == (["e7"], 0)
    assert listed(book, "resumed") == (["e1"], 0)
    slowest, left_out = listed(book, "slowest", limit=4)
    assert (slowest[0], sorted(slowest[1:]), left_out) == ("e4", ["r5", "r6", "r7"], 3)


def test_a_timeline_in_flight_has_its_progress(book: TimelineBook, clock: Clock) -> None:
    """A timeline in flight has its progress, in a list and alone, and an ended timeline has none."""
    timeline = offered(book, "r3")
    clock.now += 2
    [[in_list], _] = book.list_of("running", None, 1, progress)
    [[alone], _] = book.find("r3", progress_of=progress)
    book.end(timeline, "stop", 1)

    assert in_list.progress == alone.progress == RequestProgress(seconds=4.0, idle_s=3.0, tokens=1)
    assert book.find("r3", "alice", progress)[0][0].progress is None
    assert book.find("r3", "bob", progress) == ([], 0)
