"""Spans, whose times and ids were recorded while a request ran, and the interface to exporters."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

from ...schemas.checks import TRACEPARENT_PATTERN, describe
from ...schemas.errors import InvalidRequest
from ...schemas.options import pip_install

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    Tracing = bool | TracerProvider
else:
    Tracing = object


Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Attribute]
SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
_SAMPLED: Final = 1


def new_trace_id() -> int:
    """Return a random id of the system. Training programs seed Python's generator with the same number on each rank."""
    return int.from_bytes(os.urandom(16)) or 1


def new_span_id() -> int:
    """Return a random id of the system, as `new_trace_id`."""
    return int.from_bytes(os.urandom(8)) or 1


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identifies a span, also across processes."""

    trace_id: int
    span_id: int
    is_sampled: bool
    """True if the span, and the spans below it, are exported."""
    tracestate: str | None = None

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None = None) -> Self | None:
        """Return the span of a W3C `traceparent`; None without one, or if it is invalid."""
        if traceparent is None or TRACEPARENT_PATTERN.fullmatch(traceparent) is None:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED), tracestate)

    @property
    def traceparent(self) -> str:
        """The context as a W3C `traceparent`, version 00."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    def child(self) -> "SpanContext":
        """Return a new span's context, in the same trace."""
        return SpanContext(self.trace_id, new_span_id(), self.is_sampled, self.tracestate)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event within a span."""

    name: str
    at_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended."""

    name: str
    kind: SpanKind
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    """Unix time in nanoseconds."""
    end_ns: int
    attributes: Attributes
    events: Sequence[SpanEvent] = ()
    links: Sequence[SpanContext] = ()
    error: str | None = None
    """The code of the error that ended it; None: it ended without an error."""


@dataclass(slots=True)
class TracingStats:
    """Counters of spans."""

    spans_exported: int = 0
    """Spans that the collector, or the processors of a caller's provider, accepted."""
    spans_failed: int = 0
    """Spans that the collector did not accept."""
    spans_dropped: int = 0
    """Spans that were never sent: too many in a second, or no room in the queue."""


class Tracer(Protocol):
    """Decides which spans are sampled, and exports them."""

    stats: TracingStats

    def start(
        self, name: str, kind: SpanKind, parent: SpanContext | None, links: Sequence[SpanContext] = ()
    ) -> SpanContext:
        """Choose a span's ids, and whether it is exported. Without a parent, begin a trace."""

    def current(self) -> SpanContext | None:
        """Return the active span of the calling code, as the tracing system reports it; None: there is none."""

    def export(self, spans: Sequence[Span]) -> None:
        """Add sampled spans of one request to the queue. Return immediately; spans may be dropped."""

    def close(self) -> None:
        """Flush the waiting spans, for some seconds at most, and stop the exporter."""


class Clock:
    """Converts times of `time.monotonic()` to Unix time, by one reading of both clocks."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, monotonic_s: float) -> int:
        """Return the same moment in nanoseconds of Unix time."""
        return self._offset_ns + round(monotonic_s * 1e9)


def check_tracing(tracing: Tracing, field: str = "tracing") -> Tracing:
    """Validate a value for `make_tracer`. OpenTelemetry is imported only if tracing is requested.

    Raises:
        InvalidRequest: OpenTelemetry is not installed, or `tracing` is neither a bool nor a provider.
    """
    if tracing is False:
        return tracing
    try:
        from . import otel
    except ImportError as exc:
        problem = f"needs {exc.name}, which is not installed"
        raise InvalidRequest(field, problem, f"False, or {pip_install('otel')}") from exc
    if tracing is not True and not otel.is_provider(tracing):
        allowed = "True, False or a TracerProvider of opentelemetry.sdk.trace"
        raise InvalidRequest(field, f"is {describe(tracing)}", allowed)
    return tracing


def make_tracer(tracing: Tracing, *, service_name: str, field: str = "tracing") -> Tracer | None:
    """Start a tracer, which the caller closes; None: tracing is off, also by `OTEL_SDK_DISABLED`.

    Args:
        tracing: False: off. True: an exporter by OTLP over HTTP, set up by the environment (`OTEL_*`). Else a
            `TracerProvider` of OpenTelemetry's SDK, which is used unchanged, and neither flushed nor shut down.
        service_name: the name if the environment sets none.
        field: the caller's name for `tracing`, for errors.
    """
    if check_tracing(tracing, field) is False:
        return None
    from . import otel

    if otel.is_provider(tracing):
        return otel.tracer_of(tracing)
    try:
        return otel.exporting_tracer(service_name)
    except ValueError as exc:
        raise InvalidRequest(field, f"cannot be set up: {exc}", "valid OTEL_* variables") from exc
