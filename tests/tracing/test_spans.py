"""How spans are created and bounded: by the sampler, by a rate, and by the queue for the collector."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased

import rollbus
from rollbus.bus.protocol.telemetry.requests import RETURNED
from rollbus.bus.tracing import names, otel
from rollbus.bus.tracing.otel import OtelTracer, exporting_tracer, tracer_of
from rollbus.bus.tracing.spans import Span, SpanContext, SpanEvent, make_tracer
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.telemetry import RequestTimeline, TimelineEvent
from rollbus.workers.__main__ import main
from rollbus.workers.request_spans import RequestSpans
from tests.support.waits import until_true
from tests.tracing.otlp import Collector, collector

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


# Without tracing, OpenTelemetry is not imported.


PROGRAM = """
import asyncio, sys
import httpx
import rollbus
from rollbus.frontend.http.server import listen, serving
from rollbus.frontend.http import Settings
from rollbus.workers import __main__
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

async def run(url, fleet):
    worker = Worker(WorkerConfig(nats_url=url, fleet=fleet, model="m", listen_s=0.0), SyntheticEngine())
    listening = listen("127.0.0.1", 0)
    address = "http://127.0.0.1:%d" % listening.getsockname()[1]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        async with rollbus.connect(url, fleet=fleet) as rb, serving(rb, Settings(), listening):
            await rb.fleet.wait_for_workers()
            async with httpx.AsyncClient(base_url=address) as http:
                body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
                answer = await http.post("/inference/v1/generate", json=body, headers={"traceparent": sys.argv[3]})
                assert answer.status_code == 200, answer.text
        worker.stop()

asyncio.run(run(*sys.argv[1:3]))
print(sorted(name for name in sys.modules if name.split(".")[0] == "opentelemetry"))
"""


def test_opentelemetry_is_not_imported_without_tracing(nats_url: str, fleet: str) -> None:
    """A client, a worker and an HTTP service without tracing serve a traced request and do not import OpenTelemetry."""
    trace = f"00-{'a' * 32}-{'b' * 16}-01"

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, nats_url, fleet, trace], capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the import of OpenTelemetry fail, as if the extra were not installed."""
    monkeypatch.delitem(sys.modules, "rollbus.bus.tracing.otel", raising=False)
    monkeypatch.delattr("rollbus.bus.tracing.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


@pytest.mark.usefixtures("not_installed")
def test_the_error_names_the_missing_extra(capsys: pytest.CaptureFixture[str]) -> None:
    """If the extra is missing, the client fails before it connects, and the worker with a usage error.

    Without tracing there is no error.
    """
    with pytest.raises(InvalidRequest, match=r"tracing needs opentelemetry, which is not installed.*\[otel\]"):
        rollbus.connect(tracing=True)
    assert main(["--engine", "synthetic", "--otel"]) == 2
    assert "--otel needs opentelemetry" in capsys.readouterr().err
    assert repr(rollbus.connect(tracing=False))


@pytest.mark.parametrize("wrong", [None, 1, "yes", object()])
def test_only_a_provider_of_the_sdk_is_accepted(wrong: object) -> None:
    """Only a provider of OpenTelemetry's SDK is accepted.

    Other providers cannot give a span the id that its request carries.
    """
    with pytest.raises(InvalidRequest, match="True, False or a TracerProvider"):
        rollbus.connect(tracing=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "'many'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "max_queue_size"),
    ],
)
def test_an_invalid_environment_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    """An invalid environment variable is an error, because spans would otherwise be lost silently."""
    monkeypatch.setenv(name, value)

    with pytest.raises(InvalidRequest, match=said):
        make_tracer(True, service_name="test")


def test_otel_sdk_disabled_disables_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_SDK_DISABLED` disables tracing."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert make_tracer(True, service_name="test") is None


def test_attribute_names_equal_the_names_in_the_conventions_of_opentelemetry() -> None:
    """The constants for attribute names equal the names in the installed conventions of OpenTelemetry."""
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes, url_attributes
    from opentelemetry.semconv.attributes import error_attributes, http_attributes

    from rollbus.bus.tracing import names

    theirs = (gen_ai_attributes, messaging_attributes, url_attributes, error_attributes, http_attributes)
    known = {value for module in theirs for name, value in vars(module).items() if name.isupper()}
    ours = {
        name: value
        for name in filter(str.isupper, vars(names))
        if not (value := getattr(names, name)).startswith("rollbus.")
    }

    assert {name: value for name, value in ours.items() if value not in known} == {}


# The spans that a worker creates from a request's timeline.


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
