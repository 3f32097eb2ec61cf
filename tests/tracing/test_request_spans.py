"""The spans that a worker creates from a request's timeline."""

from typing import Any

import pytest

from rollbus.bus.protocol.telemetry.requests import RETURNED
from rollbus.bus.tracing import names
from rollbus.bus.tracing.spans import Span, SpanContext
from rollbus.schemas.telemetry import RequestTimeline, TimelineEvent
from rollbus.workers.request_spans import RequestSpans
from tests.tracing.test_otel import in_memory

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def event(name: str, at: float, **fields: Any) -> TimelineEvent:
    """Return an event of a timeline."""
    return TimelineEvent(event=name, at=1e9 + at, **fields)


def spans_of(*events: TimelineEvent, traceparent: str | None = TRACEPARENT, lane: str | None = "normal") -> list[Span]:
    """Return the exported spans of a timeline with these events."""
    exported: list[Span] = []
    tracer, _ = in_memory()
    tracer.export = exported.extend  # type: ignore[method-assign, assignment]
    timeline = RequestTimeline(
        request_id="r", client="c", lane=lane, prompt_tokens=5, traceparent=traceparent, events=events
    )
    RequestSpans(tracer, worker="w", model="m").export(timeline)
    return exported


def test_a_timeline_becomes_a_worker_span_and_an_engine_span() -> None:
    """A timeline becomes a worker span and an engine span with all weight versions.

    The engine span has the events after its start.
    """
    worker, engine = spans_of(
        event("published", -5),
        event("offered", 0, weight_version=7),
        event("started", 1),
        event("prefilled", 2, tokens=5, cached_tokens=4),
        event("first_token", 3),
        event("held", 4, tokens=2, reason="update"),
        event("resumed", 5),
        event("weights", 6, weight_version=8, tokens=2),
        event("ended", 9, tokens=10, reason="length"),
    )

    assert worker.parent == SpanContext.parse(TRACEPARENT)
    assert engine.parent == worker.context
    seconds = [(span.start_ns / 1e9 - 1e9, span.end_ns / 1e9 - 1e9) for span in (worker, engine)]
    assert seconds == [(0, 9), (1, 9)]
    assert [each.name for each in engine.events] == ["prefilled", "first_token", "held", "resumed", "weights"]
    assert engine.events[2].attributes == {names.TOKENS: 2, names.REASON: "update"}
    assert worker.attributes[names.WEIGHT_VERSIONS] == engine.attributes[names.WEIGHT_VERSIONS] == [7, 8]
    assert worker.attributes[names.LANE] == "normal"
    found = {name: engine.attributes[name] for name in (names.INPUT_TOKENS, names.OUTPUT_TOKENS, names.CACHED_TOKENS)}
    assert list(found.values()) == [5, 10, 4]
    assert engine.attributes[names.FINISH_REASONS] == ["length"]
    assert engine.attributes[names.TIME_TO_FIRST_CHUNK] == 2
    assert (worker.error, engine.error) == (None, None)


@pytest.mark.parametrize(
    ("reason", "error", "returned"),
    [("abort", None, False), ("engine_dead", "engine_dead", False), ("error", "error", False), (RETURNED, None, True)],
)
def test_the_span_of_a_failed_request_has_its_error_code(reason: str, error: str | None, returned: bool) -> None:
    """A failed request has the code of its error. A request that returned to the queue has no error."""
    (span,) = spans_of(event("offered", 0, weight_version=0), event("ended", 1, tokens=0, reason=reason), lane=None)

    assert span.error == error
    assert span.attributes.get(names.ERROR_TYPE) == error
    assert span.attributes.get(names.RELEASED, False) is returned
    assert names.LANE not in span.attributes


@pytest.mark.parametrize("traceparent", [TRACEPARENT[:-1] + "0", TRACEPARENT, None, "garbage", "0" * 256])
def test_the_sampled_flag_decides_whether_spans_are_exported(traceparent: str | None) -> None:
    """The sampled flag decides whether spans are exported.

    An invalid traceparent, as foreign programs may send, starts a new trace.
    """
    found = spans_of(event("offered", 0), event("ended", 1, reason="stop"), traceparent=traceparent)

    assert bool(found) is (traceparent is None or not traceparent.endswith("-00"))
    assert {span.parent is not None for span in found} <= {traceparent == TRACEPARENT}


def test_a_request_that_was_never_offered_has_no_span() -> None:
    """A request that the worker rejected or returned immediately has no span."""
    assert spans_of(event("published", 0), event("ended", 1, reason=RETURNED)) == []
