"""What a span is here, and the seam to whatever exports it: times and ids that were noted while a request went on."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, Self

from ...schemas.trace_context import TRACEPARENT_PATTERN

__all__ = [
    "Attribute",
    "Attributes",
    "Clock",
    "Span",
    "SpanContext",
    "SpanEvent",
    "SpanKind",
    "Tracer",
    "TracingStats",
    "new_span_id",
    "new_trace_id",
]

Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Attribute]
SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
_SAMPLED: Final = 1


def new_trace_id() -> int:
    """Draw an id. By the system: programs that train seed Python's generator, on each rank with the same number."""
    return int.from_bytes(os.urandom(16)) or 1


def new_span_id() -> int:
    """Draw an id, as `new_trace_id`."""
    return int.from_bytes(os.urandom(8)) or 1


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Names a span, also across processes."""

    trace_id: int
    span_id: int
    is_sampled: bool
    """The span, and those below it, are exported."""
    tracestate: str | None = None

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None = None) -> Self | None:
        """The span that a W3C `traceparent` names; None without one, and for what is none."""
        if traceparent is None or TRACEPARENT_PATTERN.fullmatch(traceparent) is None:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED), tracestate)

    @property
    def traceparent(self) -> str:
        """As W3C writes it, version 00."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    def child(self) -> "SpanContext":
        """Return a new span's context, in the same trace."""
        return SpanContext(self.trace_id, new_span_id(), self.is_sampled, self.tracestate)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened inside of a span."""

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
    """Unix time."""
    end_ns: int
    attributes: Attributes
    events: Sequence[SpanEvent] = ()
    links: Sequence[SpanContext] = ()
    error: str | None = None
    """Code of the error with which it ended; None: it ended well."""


@dataclass(slots=True)
class TracingStats:
    """Counters of spans."""

    spans_exported: int = 0
    """Taken by the collector, or by the processors of a provider that somebody else made."""
    spans_failed: int = 0
    """Not taken by the collector."""
    spans_dropped: int = 0
    """Never sent: too many in a second, or no room in the queue."""


class Tracer(Protocol):
    """Decides what is sampled, and exports it."""

    stats: TracingStats

    def start(
        self, name: str, kind: SpanKind, parent: SpanContext | None, links: Sequence[SpanContext] = ()
    ) -> SpanContext:
        """Choose a span's ids, and whether it is exported. Without a parent it begins a trace."""

    def current(self) -> SpanContext | None:
        """The span that the calling code is in, by the tracing system's own account; None: in none."""

    def export(self, spans: Sequence[Span]) -> None:
        """Hand over sampled spans of one request; returns at once, and may drop them."""

    def close(self) -> None:
        """Hand over what waits, for some seconds at most, and end what was started."""


class Clock:
    """Turns times of `time.monotonic()` into Unix time, by one look at both clocks."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, monotonic_s: float) -> int:
        """The same moment in nanoseconds of Unix time."""
        return self._offset_ns + round(monotonic_s * 1e9)
