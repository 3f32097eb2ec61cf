"""How spans are made and bounded: by the sampler, in number a second, and in a queue that waits for the collector."""

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
    """A tracer of a provider that keeps what it gets."""
    provider, kept = TracerProvider(**options), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = tracer_of(provider)
    assert tracer is not None
    return tracer, kept


def span(context: SpanContext, parent: SpanContext | None = None, **fields: Any) -> Span:
    """A span of a second."""
    values: dict[str, Any] = {"name": "s", "kind": "client", "start_ns": 10**18, "end_ns": 10**18 + 10**9}
    return Span(context=context, parent=parent, attributes={}, **{**values, **fields})


def test_a_span_keeps_what_was_noted() -> None:
    """Ids, times, parent, state, events, links, and the error as its code."""
    tracer, kept = in_memory()
    context, link = PARENT.child(), SpanContext(1, 2, is_sampled=False)

    event = SpanEvent("first_token", 10**18 + 5, {names.OUTPUT_TOKENS: 1})
    tracer.export([span(context, PARENT, events=[event], links=[link], error="timeout")])

    (made,) = kept.get_finished_spans()
    assert made.context is not None
    assert made.parent is not None
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
def test_the_provider_samples(sampler: Sampler | None, parent: SpanContext | None, expected: bool) -> None:
    """Its sampler decides, and sees the parent; the state of the trace is handed on."""
    context = in_memory(sampler=sampler)[0].start("s", "client", parent)

    assert context.is_sampled is expected
    assert (context.trace_id == 0xA) is (parent is not None)
    assert context.tracestate == (None if parent is None else parent.tracestate)
    assert SpanContext.parse(context.traceparent, context.tracestate) == context


def test_ids_do_not_repeat_where_generators_are_seeded() -> None:
    """Every rank of a trainer seeds Python's generator with the same number."""
    import random

    tracer, _ = in_memory()
    ids = []
    for _ in range(2):
        random.seed(0)
        ids.append(tracer.start("s", "client", None))

    assert len({each.trace_id for each in ids}) == len({each.span_id for each in ids}) == 2


def test_the_active_span_of_the_caller_is_found() -> None:
    """By OpenTelemetry's own account; outside of any span there is none."""
    tracer, _ = in_memory()
    other = TracerProvider().get_tracer("trainer")

    assert tracer.current() is None
    with other.start_as_current_span("step") as active:
        found = tracer.current()
        assert found is not None
        assert found.span_id == active.get_span_context().span_id
        # And what is exported meanwhile is not below it.
        tracer.export([span(PARENT.child(), PARENT)])


def test_a_flood_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has everything sampled gets a burst, and then so many in a second; what is dropped is logged, once."""
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


def test_what_others_raise_harms_nobody() -> None:
    """A sampler and a processor of the user that fail: nothing is sampled, spans are counted as dropped."""

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
    assert tracer is not None

    assert not tracer.start("s", "client", None).is_sampled
    tracer.export([span(PARENT.child(), PARENT)] * 2)
    assert tracer.stats.spans_dropped == 2


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, to which everything sends that is told to."""
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield found


def exporter_threads() -> list[threading.Thread]:
    """Those that the SDK has started here."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]


def test_closing_sends_what_waits(collected: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans of a process are there, under the name of its service, and the exporter's thread is gone."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    before = exporter_threads()
    tracer = exporting_tracer("mine")
    assert tracer is not None
    assert exporter_threads() != before

    tracer.export([span(PARENT.child(), PARENT)])
    tracer.close()

    assert [(each.service, each.tracestate) for each in collected.spans] == [("mine", "v=1")]
    assert tracer.stats.spans_exported == 1
    assert exporter_threads() == before


def test_the_environment_names_the_service(collected: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_SERVICE_NAME` comes first."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    tracer = exporting_tracer("mine")
    assert tracer is not None

    tracer.export([span(PARENT.child(), PARENT)])
    tracer.close()

    assert [each.service for each in collected.spans] == ["theirs"]


async def test_a_collector_that_hangs_fills_the_queue_and_no_more(
    collected: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans that find no room are dropped and counted; those that found some are sent when it goes on."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    collected.answers.clear()
    tracer = exporting_tracer("mine")
    assert tracer is not None

    for _ in range(100):
        tracer.export([span(PARENT.child(), PARENT)])
    assert tracer.stats.spans_dropped == 80
    collected.answers.set()
    await until_true(lambda: tracer.stats.spans_exported == 20)
    tracer.close()

    assert len(collected.spans) == 20


def test_a_collector_that_refuses_is_counted(collected: Collector) -> None:
    """400: sent once, and not again."""
    collected.status = 400
    tracer = exporting_tracer("mine")
    assert tracer is not None

    tracer.export([span(PARENT.child(), PARENT)] * 3)
    tracer.close()

    assert (tracer.stats.spans_failed, tracer.stats.spans_exported, collected.spans) == (3, 0, [])


def test_a_provider_of_the_user_is_left_alone() -> None:
    """Closing neither flushes nor ends it."""
    tracer, kept = in_memory()

    tracer.close()
    tracer.export([span(PARENT.child(), PARENT)])

    assert len(kept.get_finished_spans()) == 1
