"""The merged timelines of several workers: order, workers without an answer, durations and clock differences."""

import msgspec
import pytest

from rollbus.bus.protocol.fleet.command_result import CommandResult
from rollbus.bus.protocol.telemetry.requests import (
    RequestPause,
    WorkerTimeline,
    clock_skews,
    merge_timelines,
    phases_of,
)
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.telemetry import RequestTimeline, TimelineEvent
from tests.support import fleet


def ack(worker: str, *timelines: RequestTimeline, left_out: int = 0, error: str | None = None) -> Ack:
    """Return a worker's command ack."""
    fields = {"worker": worker, "incarnation": f"{worker}-1", "timelines": timelines, "timelines_left_out": left_out}
    if error is not None:
        fields |= {"status": AckStatus.FAILED, "error": AckError(code=ControlCode.NOT_SERVING, message=error)}
    return fleet.ack(command="read_request", **fields)


def timeline(*events: tuple[float, str], attempt: int = 0, child: int = 0, client: str = "alice") -> RequestTimeline:
    """Return a timeline of request `r`."""
    happened = tuple(TimelineEvent(at=at, event=event) for at, event in events)
    return RequestTimeline(request_id="r", client=client, attempt=attempt, child=child, events=happened)


def at(worker: str, told: RequestTimeline) -> WorkerTimeline:
    """Return a timeline with the worker that reported it."""
    return WorkerTimeline(**msgspec.structs.asdict(told), worker=worker, incarnation="1", model="m")


def result(*acks: Ack, missing: dict[str, str] | None = None) -> CommandResult:
    """Return the result of the command."""
    by_worker = {each.worker: each for each in acks}
    return CommandResult(
        command="read_request",
        id="x",
        applied={worker: each for worker, each in by_worker.items() if each.error is None},
        failed={worker: each for worker, each in by_worker.items() if each.error is not None},
        missing=missing or {},
    )


def test_timelines_are_sorted_by_client_sample_and_attempt() -> None:
    """Timelines are sorted by client, sample and attempt, regardless of the order in which the workers answered."""
    trace = merge_timelines(
        "r",
        result(
            ack("b", timeline((2, "offered"), attempt=1), timeline((9, "offered"), client="zoe")),
            ack("a", timeline((1, "offered")), timeline((1, "offered"), child=1), left_out=4),
        ),
    )

    assert [(one.client, one.child, one.attempt, one.worker, one.incarnation) for one in trace.timelines] == [
        ("alice", 0, 0, "a", "a-1"),
        ("alice", 0, 1, "b", "b-1"),
        ("alice", 1, 0, "a", "a-1"),
        ("zoe", 0, 0, "b", "b-1"),
    ]
    assert (trace.workers_asked, trace.workers_answered, trace.silent, trace.left_out) == (2, 2, {}, 4)


def test_the_timeline_of_the_prefill_worker_comes_before_that_of_the_decode_worker() -> None:
    """The prefill worker's timeline comes before the decode worker's, because the prefill worker offered first."""
    trace = merge_timelines(
        "r",
        result(
            ack("d", timeline((1, "published"), (4, "offered"))), ack("p", timeline((1, "published"), (2, "offered")))
        ),
    )

    assert [one.worker for one in trace.timelines] == ["p", "d"]


def test_timelines_beyond_the_maximum_of_a_request_are_only_counted() -> None:
    """Of more timelines than a request can have, the first are kept and the others are counted."""
    told = [timeline(client=f"c{number:03}") for number in range(256)]

    trace = merge_timelines("r", result(*(ack(f"w{number}", *told) for number in range(20))))

    assert (len(trace.timelines), trace.left_out) == (4096, 20 * 256 - 4096)


def test_workers_without_an_answer_are_listed_with_the_reason() -> None:
    """A worker that failed to answer, that is lost or that does not support the command is listed with the reason."""
    trace = merge_timelines("r", result(ack("a"), ack("b", error="too many reads"), missing={"c": "it is gone"}))

    assert (trace.timelines, trace.workers_asked, trace.workers_answered) == ((), 3, 1)
    assert trace.silent == {"b": "too many reads", "c": "it is gone"}


def test_all_fields_of_a_timeline_are_in_its_json() -> None:
    """The JSON of a timeline contains all fields, also those with their default, so readers need no defaults."""
    told = msgspec.json.decode(msgspec.json.encode(at("a", timeline((1.5, "offered")))))

    assert told == {
        "request_id": "r", "given_id": "", "client": "alice", "attempt": 0, "child": 0, "lane": None, "lora": None,
        "prompt_tokens": 0,
        "traceparent": None, "events": [{"at": 1.5, "event": "offered"}], "worker": "a", "incarnation": "1",
        "model": "m", "phase": None, "lost": [], "number": 1, "progress": None,
    }  # fmt: skip


def test_phases_are_queue_slot_prefill_and_decode_without_pauses() -> None:
    """The phases are queue, slot, prefill and decode, and none of them contains a pause."""
    told = timeline(
        (10, "published"), (12, "offered"), (13, "started"), (17, "prefilled"), (17, "first_token"), (20, "held"),
        (25, "resumed"), (30, "ended"),
    )  # fmt: skip

    phases = phases_of(told)

    assert (phases.queue_s, phases.slot_s, phases.prefill_s, phases.decode_s) == (2, 1, 4, 8)
    assert phases.pauses == (RequestPause(20, 5, None),)


def test_pauses_and_phases_that_have_not_ended_have_no_duration() -> None:
    """A pause that has not ended has no duration, and neither have phases that have not ended."""
    phases = phases_of(timeline((12, "offered"), (13, "started"), (14, "held")))

    assert (phases.queue_s, phases.slot_s, phases.prefill_s, phases.decode_s) == (None, 1, None, None)
    assert phases.pauses == (RequestPause(14, None, None),)


def test_a_pause_ends_with_its_request() -> None:
    """A pause ends when its request ends, for example by an abort."""
    assert phases_of(timeline((14, "held"), (16, "ended"))).pauses == (RequestPause(14, 2, None),)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1.0, 1.2), (5.0, 5.1), {}),
        ((1.0, 0.995), (5.0, 5.1), {}),
        ((1.0, 0.5), (5.0, 5.1), {"a": -0.5}),
        ((1.0, 6.0), (5.0, 5.1), {"a": 1.0}),
        ((1.0, 1.1), (5.0, 2.0), {"b": -3.0}),
        # The queue delivered a message again, so both attempts have the same publication time.
        ((1.0, 1.1), (1.0, 5.0), {}),
    ],
)
def test_a_worker_with_an_impossible_offer_time_has_a_skewed_clock(
    first: tuple[float, float], second: tuple[float, float], expected: dict[str, float]
) -> None:
    """A worker's clock is skewed if it offers a request before its publication or after that of the next attempt."""
    timelines = [
        at("a", timeline((first[0], "published"), (first[1], "offered"))),
        at("b", timeline((second[0], "published"), (second[1], "offered"), attempt=1)),
    ]

    assert clock_skews(timelines) == pytest.approx(expected)
