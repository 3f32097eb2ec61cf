"""OpenTelemetry spans of requests at a worker, created from the timeline after the request has ended."""

from typing import Final

from ..bus.protocol.telemetry.requests import RETURNED
from ..bus.tracing import names
from ..bus.tracing.spans import Attribute, Span, SpanContext, SpanEvent, Tracer
from ..schemas.chunk import FinishReason
from ..schemas.telemetry import RequestTimeline, TimelineEvent

OPERATION: Final = "text_completion"
_FINISH_REASONS: Final = frozenset(map(str, FinishReason)) - {FinishReason.ERROR}


class RequestSpans:
    """Exports two spans per sampled request: from the offer to the end, and the time in the engine.

    Args:
        model: name of the model in requests.
    """

    def __init__(self, tracer: Tracer, *, worker: str, model: str) -> None:
        self._tracer = tracer
        self._worker = worker
        self._model = model

    def export(self, timeline: RequestTimeline) -> None:
        """Export the spans of an ended timeline. Export none if the worker never offered the request."""
        at: dict[str, TimelineEvent] = {}
        for event in timeline.events:
            at.setdefault(event.event, event)
        if "offered" not in at or "ended" not in at:
            return
        name, parent = f"worker {self._model}", SpanContext.parse(timeline.traceparent)
        context = self._tracer.start(name, "consumer", parent)
        if not context.is_sampled:
            return
        ended = timeline.events[-1]
        common: dict[str, Attribute] = {
            names.REQUEST_ID: timeline.request_id,
            names.CLIENT: timeline.client,
            names.CHILD: timeline.child,
            names.ATTEMPT: timeline.attempt,
            names.WORKER: self._worker,
            names.WEIGHT_VERSIONS: _list_versions(timeline),
        }
        queue = {names.MESSAGING_SYSTEM: "nats", names.MESSAGING_OPERATION: "process"}
        placed = {} if timeline.lane is None else {names.LANE: timeline.lane}
        reason, error = ended.reason or "", None
        if reason == RETURNED:
            common[names.RELEASED] = True
        elif reason not in _FINISH_REASONS:
            error = common[names.ERROR_TYPE] = reason
        spans = [
            Span(
                name=name,
                kind="consumer",
                context=context,
                parent=parent,
                start_ns=_to_ns(at["offered"]),
                end_ns=_to_ns(ended),
                attributes=common | queue | placed,
                error=error,
            )
        ]
        if "started" in at:
            spans.append(
                Span(
                    name=f"engine {self._model}",
                    kind="internal",
                    context=context.child(),
                    parent=context,
                    start_ns=_to_ns(at["started"]),
                    end_ns=_to_ns(ended),
                    attributes=common | self._describe_engine(timeline, at, ended),
                    events=[_make_event(event) for event in timeline.events if event.at > at["started"].at][:-1],
                    error=error,
                )
            )
        self._tracer.export(spans)

    def _describe_engine(
        self, timeline: RequestTimeline, at: dict[str, TimelineEvent], ended: TimelineEvent
    ) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {
            names.OPERATION: OPERATION,
            names.PROVIDER: "rollbus",
            names.REQUEST_MODEL: self._model,
            names.INPUT_TOKENS: timeline.prompt_tokens,
            names.OUTPUT_TOKENS: ended.tokens or 0,
        }
        if ended.reason in _FINISH_REASONS:
            attributes[names.FINISH_REASONS] = [str(ended.reason)]
        if "prefilled" in at and at["prefilled"].cached_tokens is not None:
            attributes[names.CACHED_TOKENS] = at["prefilled"].cached_tokens
        if "first_token" in at:
            attributes[names.TIME_TO_FIRST_CHUNK] = max(at["first_token"].at - at["started"].at, 0.0)
        return attributes


def _list_versions(timeline: RequestTimeline) -> list[int]:
    versions = (event.weight_version for event in timeline.events if event.event in {"offered", "weights"})
    return list(dict.fromkeys(version for version in versions if version is not None))


def _to_ns(event: TimelineEvent) -> int:
    return round(event.at * 1e9)


def _make_event(event: TimelineEvent) -> SpanEvent:
    fields = {
        names.TOKENS: event.tokens,
        names.WEIGHT_VERSION: event.weight_version,
        names.REASON: event.reason,
        names.CACHED_TOKENS: event.cached_tokens,
    }
    return SpanEvent(event.event, _to_ns(event), {name: value for name, value in fields.items() if value is not None})
