"""Exports spans with OpenTelemetry. No other module imports OpenTelemetry.

The tracer creates the SDK's spans when a request has ended, with recorded ids and times. A running request therefore
costs only the recording. Three limits bound the export: the sampler; `MAX_SPANS_PER_S`, because the flags of callers
may sample everything; and the queue of the exporter, whose thread alone waits for the collector.
"""

import copy
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

from ...schemas.errors import ForeignError, foreign_code
from .spans import Span, SpanContext, SpanKind, TracingStats, new_span_id, new_trace_id

logger = logging.getLogger(__name__)

MAX_SPANS_PER_S: Final = 1000
"""Maximum spans per second, about 2% of a core in a worker. A worker has two spans per request, far below this."""
BURST: Final = 2 * MAX_SPANS_PER_S
"""Spans that may be exported at once. Requests end together, and a request with many samples has hundreds of spans."""
MAX_QUEUE_SPANS: Final = 2048
"""Maximum spans in the exporter's queue, the SDK's default for `OTEL_BSP_MAX_QUEUE_SIZE`."""
CLOSE_S: Final = 5.0
"""Seconds for the last spans of a process that ends. A working collector answers in milliseconds."""
WARN_S: Final = 60.0
"""Seconds between two log lines about dropped spans."""
_KINDS: Final[dict[SpanKind, trace.SpanKind]] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
}


class OtelTracer:
    """Creates spans with a provider of the SDK; see `Tracer`. Any thread may use it.

    Args:
        own: True if the provider belongs to this tracer and ends with it.
        stats: counted by the exporter, too.
    """

    def __init__(self, provider: TracerProvider, tracer: SdkTracer, *, own: bool, stats: TracingStats) -> None:
        self._provider = provider
        self._own = own
        self.stats = stats
        self._chosen = _Chosen()
        # The SDK shares a tracer between all users of its name.
        self._tracer = copy.copy(tracer)
        self._tracer.id_generator = self._tracer.sampler = self._chosen
        self._lock = threading.Lock()
        self._allowance, self._allowed_at = float(BURST), time.monotonic()
        self._warned_at, self._num_warned = -WARN_S, 0

    def start(
        self, name: str, kind: SpanKind, parent: SpanContext | None, links: Sequence[SpanContext] = ()
    ) -> SpanContext:
        """Ask the provider's sampler, and generate ids."""
        trace_id = new_trace_id() if parent is None else parent.trace_id
        try:
            with foreign_code():
                result = self._provider.sampler.should_sample(
                    _context(parent), trace_id, name, _KINDS[kind], None, [_link(link) for link in links]
                )
                state = result.trace_state.to_header() if result.trace_state else ""
                is_sampled = result.decision is Decision.RECORD_AND_SAMPLE
        except ForeignError as exc:
            logger.warning("spans.sampling_failed error=%s", exc)
            state, is_sampled = "", False
        return SpanContext(trace_id, new_span_id(), is_sampled, state or None)

    def current(self) -> SpanContext | None:
        """Return the active span of the calling code."""
        found = trace.get_current_span().get_span_context()
        if not found.is_valid:
            return None
        return SpanContext(
            found.trace_id, found.span_id, found.trace_flags.sampled, found.trace_state.to_header() or None
        )

    def export(self, spans: Sequence[Span]) -> None:
        """Create and export the SDK's spans, unless there are too many."""
        with self._lock:
            if self._is_allowed(len(spans)):
                self._make_all(spans)
            else:
                self.stats.spans_dropped += len(spans)
            self._warn()

    def _is_allowed(self, num_spans: int) -> bool:
        now = time.monotonic()
        earned = (now - self._allowed_at) * MAX_SPANS_PER_S
        self._allowance, self._allowed_at = min(self._allowance + earned, BURST), now
        if num_spans > self._allowance:
            return False
        self._allowance -= num_spans
        return True

    def _make_all(self, spans: Sequence[Span]) -> None:
        try:
            with foreign_code():
                for span in spans:
                    self._make(span)
        except ForeignError as exc:
            # A provider of the caller has processors of other authors.
            self.stats.spans_dropped += len(spans)
            logger.warning("spans.creation_failed error=%s", exc)
        else:
            if not self._own:
                self.stats.spans_exported += len(spans)

    def _make(self, span: Span) -> None:
        self._chosen.context = span.context
        made = self._tracer.start_span(
            span.name,
            context=_context(span.parent),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            links=[_link(link) for link in span.links],
            start_time=span.start_ns,
        )
        for event in span.events:
            made.add_event(event.name, event.attributes, event.at_ns)
        if span.error is not None:
            made.set_status(trace.StatusCode.ERROR, span.error)
        made.end(max(span.end_ns, span.start_ns))

    def _warn(self) -> None:
        num_lost, now = self.stats.spans_dropped + self.stats.spans_failed, time.monotonic()
        if num_lost > self._num_warned and now - self._warned_at >= WARN_S:
            self._warned_at, self._num_warned = now, num_lost
            logger.warning("spans.lost dropped=%s failed=%s", self.stats.spans_dropped, self.stats.spans_failed)

    def close(self) -> None:
        """Flush and end the exporter, if it belongs to this tracer. Wait `CLOSE_S` at most."""
        if self._own:
            # A collector that accepts connections and never answers delays the SDK's own shutdown for longer.
            closing = threading.Thread(target=self._provider.shutdown, name="rollbus-otel-close", daemon=True)
            closing.start()
            closing.join(CLOSE_S)


class _Chosen(Sampler, IdGenerator):
    """Gives the SDK the ids and the decision from the start of the span."""

    def __init__(self) -> None:
        self.context = SpanContext(new_trace_id(), new_span_id(), is_sampled=True)

    def generate_trace_id(self) -> int:
        return self.context.trace_id

    def generate_span_id(self) -> int:
        return self.context.span_id

    def should_sample(  # noqa: PLR0913, PLR0917 - the SDK's
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, _state(self.context.tracestate))

    def get_description(self) -> str:
        return "chosen before"


class _CountingExporter(SpanExporter):
    """Counts the spans that the collector accepts, and those that it does not."""

    def __init__(self, exporter: SpanExporter, stats: TracingStats) -> None:
        self._exporter = exporter
        self._stats = stats
        self.num_done = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.num_done += len(spans)
            if result is SpanExportResult.SUCCESS:
                self._stats.spans_exported += len(spans)
            else:
                self._stats.spans_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _BoundedProcessor(BatchSpanProcessor):
    """The SDK's batches, with a count of the spans without room in their queue."""

    def __init__(self, exporter: SpanExporter, stats: TracingStats) -> None:
        self._max_spans = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or MAX_QUEUE_SPANS)
        self._counting = _CountingExporter(exporter, stats)
        super().__init__(self._counting, max_queue_size=self._max_spans)
        self._stats = stats
        self._num_taken = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Add a span, or drop it. `OtelTracer` calls one at a time."""
        if self._num_taken - self._counting.num_done >= self._max_spans:
            self._stats.spans_dropped += 1
        else:
            self._num_taken += 1
            super().on_end(span)

    def shutdown(self) -> None:
        """Export the waiting spans. A failed attempt is not repeated without limit."""
        given_up = threading.Timer(CLOSE_S / 2, self._counting.shutdown)
        given_up.daemon = True
        given_up.start()
        try:
            super().shutdown()  # type: ignore[no-untyped-call]
        finally:
            given_up.cancel()


def _context(parent: SpanContext | None) -> Context:
    # Never use the context of the code that happens to run here.
    if parent is None:
        return Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(_remote(parent)), Context())


def _remote(context: SpanContext) -> trace.SpanContext:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if context.is_sampled else trace.TraceFlags.DEFAULT)
    return trace.SpanContext(context.trace_id, context.span_id, True, flags, _state(context.tracestate))


def _state(tracestate: str | None) -> TraceState:
    return TraceState() if tracestate is None else TraceState.from_header([tracestate])


def _link(context: SpanContext) -> trace.Link:
    return trace.Link(_remote(context))


def is_provider(value: object) -> bool:
    """Return True for a provider of the SDK: only the SDK can give spans their original ids and times."""
    return isinstance(value, TracerProvider)


def tracer_of(provider: object) -> OtelTracer | None:
    """Use a provider of the caller; None: `OTEL_SDK_DISABLED` switches it off."""
    if not isinstance(provider, TracerProvider):
        raise TypeError("the provider is not a TracerProvider of the SDK")
    return _tracer(provider, own=False, stats=TracingStats())


def exporting_tracer(service_name: str) -> OtelTracer | None:
    """Create a provider from the environment, with OTLP over HTTP; None: `OTEL_SDK_DISABLED` switches it off.

    Raises:
        ValueError: a variable has no valid value, or requests another protocol.
    """
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    if name not in os.environ:
        name = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get(name) or "http/protobuf"
    if protocol != "http/protobuf":
        raise ValueError(f"{name} is {protocol!r}; spans are sent by http/protobuf, mostly to port 4318")
    resource = Resource.create()
    # The SDK's default if the environment sets no name.
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service_name}))
    stats = TracingStats()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracer = _tracer(provider, own=True, stats=stats)
    if tracer is not None:
        provider.add_span_processor(_BoundedProcessor(OTLPSpanExporter(), stats))
    return tracer


def _tracer(provider: TracerProvider, *, own: bool, stats: TracingStats) -> OtelTracer | None:
    tracer = provider.get_tracer("rollbus")
    return OtelTracer(provider, tracer, own=own, stats=stats) if isinstance(tracer, SdkTracer) else None
