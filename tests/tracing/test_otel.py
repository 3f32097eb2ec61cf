"""How spans are created and bounded: by the sampler, by a rate, and by the queue for the collector."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased

from rollbus.bus.tracing import names, otel
from rollbus.bus.tracing.otel import OtelTracer, exporting_tracer, tracer_of
from rollbus.bus.tracing.spans import Span, SpanContext, SpanEvent
from tests.support.otlp import Collector, collector
from tests.support.waits import until_true

PARENT = SpanContext(0xA, 0xB, is_sampled=True, tracestate="v=1")
UNSAMPLED = SpanContext(0xA, 0xB, is_sampled=False)


def in_memory(**options: Any) -> tuple[OtelTracer, InMemorySpanExporter]:
    """Return a tracer whose provider stores its spans in memory."""
    provider, kept = TracerProvider(**options), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = tracer_of(provider)
    assert tracer is not None
    return tracer, kept


def span(context: SpanContext, parent: SpanContext | None = None, **fields: Any) -> Span:
    """Return a span of one second."""
    values: dict[str, Any] = {"name": "s", "kind": "client", "start_ns": 10**18, "end_ns": 10**18 + 10**9}
    return Span(context=context, parent=parent, attributes={}, **{**values, **fields})


def test_an_exported_span_has_the_values_of_the_span() -> None:
    """An exported span has the ids, times, parent, state, events and links of the span. Its error is the code."""
    tracer, kept = in_memory()
    context, link = PARENT.child(), SpanContext(1, 2, is_sampled=False)

    event = SpanEvent("first_token", 10**18 + 5, {names.OUTPUT_TOKENS: 1})
    tracer.export([span(context, PARENT, events=[event], links=[link], error="timeout")])

    (made,) = kept.get_finished_spans()
    assert (made.context.trace_id, made.context.span_id) == (context.trace_id, context.span_id)
    assert made.context.trace_state.to_header() == "v=1"
    assert made.parent.span_id == PARENT.span_id
    assert (made.start_time, made.end_time) == (10**18, 10**18 + 10**9)
    assert [(e.name, e.timestamp) for e in made.events] == [("first_token", 10**18 + 5)]
    assert [(one.context.trace_id, one.context.span_id) for one in made.links] == [(1, 2)]
    assert (made.status.status_code, made.status.description) == (trace.StatusCode.ERROR, "timeout")
    assert tracer.stats.spans_exported == 1


@pytest.mark.parametrize(
    ("sampler", "parent", "expected"),
    [
        (None, None, True),
        (None, PARENT, True),
        (None, UNSAMPLED, False),
        (ALWAYS_OFF, PARENT, False),
        (ParentBased(TraceIdRatioBased(0)), None, False),
        (ParentBased(TraceIdRatioBased(0)), PARENT, True),
    ],
)
def test_the_sampler_of_the_provider_decides_with_the_parent_context(
    sampler: Sampler | None, parent: SpanContext | None, expected: bool
) -> None:
    """The provider's sampler decides with the parent's context, and the trace state is passed on."""
    context = in_memory(sampler=sampler)[0].start("s", "client", parent)

    assert context.is_sampled is expected
    assert (context.trace_id == 0xA) is (parent is not None)
    assert context.tracestate == (None if parent is None else parent.tracestate)
    assert SpanContext.parse(context.traceparent, context.tracestate) == context


def test_ids_are_unique_even_with_a_seeded_generator() -> None:
    """Ids are unique even with a seeded generator, because each rank of a trainer uses the same seed."""
    import random

    tracer, _ = in_memory()
    ids = []
    for _ in range(2):
        random.seed(0)
        ids.append(tracer.start("s", "client", None))

    assert len({each.trace_id for each in ids}) == len({each.span_id for each in ids}) == 2


def test_the_active_span_of_the_caller_is_found() -> None:
    """The tracer finds OpenTelemetry's active span. Outside of spans there is none."""
    tracer, _ = in_memory()
    other = TracerProvider().get_tracer("trainer")

    assert tracer.current() is None
    with other.start_as_current_span("step") as active:
        found = tracer.current()
        assert found.span_id == active.get_span_context().span_id
        # A span that is exported meanwhile does not become its child.
        tracer.export([span(PARENT.child(), PARENT)])


def test_spans_beyond_the_burst_and_rate_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans are limited to a burst and a rate per second. Dropped spans are counted and logged once."""
    now = [100.0]
    monkeypatch.setattr("rollbus.bus.tracing.otel.time.monotonic", lambda: now[0])
    tracer, kept = in_memory()

    for _ in range(3 * otel.BURST):
        tracer.export([span(PARENT.child(), PARENT)])
    at_once = len(kept.get_finished_spans())
    now[0] += 1
    for _ in range(3 * otel.BURST):
        tracer.export([span(PARENT.child(), PARENT)])

    assert at_once == otel.BURST
    assert len(kept.get_finished_spans()) == otel.BURST + otel.MAX_SPANS_PER_S
    assert tracer.stats.spans_exported + tracer.stats.spans_dropped == 6 * otel.BURST
    assert [record.getMessage() for record in caplog.records] == ["spans.lost dropped=1 failed=0"]


def test_failures_of_the_users_sampler_and_processor_only_lose_spans() -> None:
    """If the user's sampler fails, nothing is sampled. If the user's processor fails, spans count as dropped."""

    class Bad(Sampler):
        def should_sample(self, *_: object, **__: object) -> Any:
            raise KeyError("sampler")

        def get_description(self) -> str:
            return "bad"

    class BadProcessor(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise KeyError(span.name)

    provider = TracerProvider(sampler=Bad())
    provider.add_span_processor(BadProcessor())
    tracer = tracer_of(provider)

    assert not tracer.start("s", "client", None).is_sampled
    tracer.export([span(PARENT.child(), PARENT)] * 2)
    assert tracer.stats.spans_dropped == 2


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that receives the spans of all traced programs of the test."""
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield found


def exporter_threads() -> list[threading.Thread]:
    """Return the exporter threads of the SDK in this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]


def test_closing_a_tracer_exports_buffered_spans(collected: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a tracer exports buffered spans under the service's name and ends the exporter's thread."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    before = exporter_threads()
    tracer = exporting_tracer("mine")
    assert exporter_threads() != before

    tracer.export([span(PARENT.child(), PARENT)])
    tracer.close()

    assert [(each.service, each.tracestate) for each in collected.spans] == [("mine", "v=1")]
    assert tracer.stats.spans_exported == 1
    assert exporter_threads() == before


def test_the_environment_names_the_service(collected: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_SERVICE_NAME` overrides the default service name."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    tracer = exporting_tracer("mine")

    tracer.export([span(PARENT.child(), PARENT)])
    tracer.close()

    assert [each.service for each in collected.spans] == ["theirs"]


async def test_spans_beyond_the_queue_are_dropped_while_the_collector_hangs(
    collected: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the collector hangs, spans beyond the queue are dropped and counted.

    Queued spans are sent when it responds again.
    """
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    collected.answers.clear()
    tracer = exporting_tracer("mine")

    for _ in range(100):
        tracer.export([span(PARENT.child(), PARENT)])
    assert tracer.stats.spans_dropped == 80
    collected.answers.set()
    await until_true(lambda: tracer.stats.spans_exported == 20)
    tracer.close()

    assert len(collected.spans) == 20


def test_spans_that_the_collector_rejects_are_counted_as_failed(collected: Collector) -> None:
    """Spans that the collector rejects with 400 are sent once and counted as failed."""
    collected.status = 400
    tracer = exporting_tracer("mine")

    tracer.export([span(PARENT.child(), PARENT)] * 3)
    tracer.close()

    assert (tracer.stats.spans_failed, tracer.stats.spans_exported, collected.spans) == (3, 0, [])


def test_closing_a_tracer_does_not_shut_down_the_provider_of_the_user() -> None:
    """Closing a tracer neither flushes nor shuts down the user's provider."""
    tracer, kept = in_memory()

    tracer.close()
    tracer.export([span(PARENT.child(), PARENT)])

    assert len(kept.get_finished_spans()) == 1
