"""The spans of one call from its opening to its end: the call, its waits in the queue, and its resumes.

The client records times and names during the call and creates the spans at its end. Attempts pass the context of the
call to their workers. Attempts that follow a lost attempt pass the context of their resume.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...schemas.chunk import Chunk
from ...schemas.errors import ErrorCode
from ...schemas.request import GenerateRequest
from ..protocol.attempt import events as on
from ..protocol.attempt.events import Instruction
from ..protocol.attempt.machine import AttemptMachine
from ..protocol.stream.response_stream import ResponseStream
from ..tracing import names
from ..tracing.spans import Attribute, Clock, Span, SpanContext, Tracer

__all__ = ["CallSpans", "traced"]

MAX_SPANS: Final = 1000
"""Maximum number of spans of one call. A request for 256 samples whose worker dies has about 770."""
MAX_VERSIONS: Final = 64
"""Maximum number of weight versions that a span lists."""
OPERATION: Final = "text_completion"


def traced(tracer: Tracer, request: GenerateRequest) -> "tuple[GenerateRequest, CallSpans | None]":
    """Begin the trace of a call, or continue the trace of its request or of the calling code.

    Returns:
        The request to send, and the collector of its spans. The collector is None if the request is not sampled. The
        trace context of the request then informs the workers of this.
    """
    parent = SpanContext.parse(request.traceparent, request.tracestate) or tracer.current()
    context = tracer.start(OPERATION, "client", parent)
    sent = request.in_trace(context.traceparent, context.tracestate)
    return sent, CallSpans(tracer, request, context, parent) if context.is_sampled else None


@dataclass(slots=True)
class _ResumeSpan:
    context: SpanContext
    began_at: float
    attributes: dict[str, Attribute]
    links: Sequence[SpanContext]


class CallSpans:
    """Collects the spans of one sampled call, and exports them at its end. Used on the bus thread after its creation.

    Args:
        parent: span that surrounds the call. None: the call begins a trace.
    """

    def __init__(
        self, tracer: Tracer, request: GenerateRequest, context: SpanContext, parent: SpanContext | None
    ) -> None:
        self._tracer = tracer
        self._request = request
        self._context = context
        self._parent = parent
        self._clock = Clock()
        self._began_at = time.monotonic()
        self._first_at: float | None = None
        self._versions: dict[int, None] = {}
        self._spans: list[Span] = []
        # By child: the resume in progress, the span of the latest attempt, and the worker of that attempt.
        self._resumes: dict[int, _ResumeSpan] = {}
        self._latest: dict[int, SpanContext] = {}
        self._workers: dict[int, str] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<CallSpans {self._request.request_id} spans={len(self._spans)} resumes={len(self._resumes)}>"

    def context_of(self, child: int) -> SpanContext | None:
        """Return the trace context of the next attempt of `child`. None: the context of the first attempt."""
        resume = self._resumes.get(child)
        return None if resume is None else resume.context

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Record chunks that were received for the caller."""
        for chunk in chunks:
            if chunk.token_ids_data:
                if self._first_at is None:
                    self._first_at = time.monotonic()
                if len(self._versions) < MAX_VERSIONS:
                    self._versions[chunk.weight_version] = None

    def note(self, child: AttemptMachine, instruction: Instruction) -> None:
        """Record an instruction of a child."""
        match instruction:
            case on.RecordAdmission(waited_s):
                self._add_wait(child, waited_s)
            case on.CountLoss(is_retried=True):
                self._begin_resume(child)
            case on.Complete():
                self._end_resume(child.stream.child, child.since)

    def _add_wait(self, child: AttemptMachine, waited_s: float) -> None:
        """Record that a worker admitted the current attempt, `waited_s` seconds after its publication."""
        index, worker = child.stream.child, child.worker or ""
        parent = self.context_of(index) or self._context
        self._latest[index] = context = parent.child()
        self._workers[index] = worker
        attributes = self._attributes(child) | {
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION: "send",
            names.WORKER: worker,
        }
        if not child.is_placed:
            attributes[names.LANE] = str(child.lane)
        self._add(
            Span(
                name=f"queue {self._request.model or ''}".rstrip(),
                kind="producer",
                context=context,
                parent=parent,
                start_ns=self._clock.unix_ns(child.since - waited_s),
                end_ns=self._clock.unix_ns(child.since),
                attributes=attributes,
            )
        )

    def _begin_resume(self, child: AttemptMachine) -> None:
        """Record that the previous attempt was lost and that another attempt follows."""
        index, error = child.stream.child, child.last_error
        self._end_resume(index, child.since)
        attributes = self._attributes(child)
        attributes[names.ERROR_TYPE] = ErrorCode.WORKER_LOST if error is None else error.code
        if (worker := self._workers.pop(index, None)) is not None:
            attributes[names.LOST_WORKER] = worker
        latest, context = self._latest.get(index), self._context.child()
        self._resumes[index] = _ResumeSpan(context, child.since, attributes, () if latest is None else (latest,))
        self._latest[index] = context

    def _end_resume(self, index: int, now: float) -> None:
        """End the resume in progress, if there is one."""
        resume = self._resumes.pop(index, None)
        if resume is not None:
            self._add(
                Span(
                    name="resume",
                    kind="internal",
                    context=resume.context,
                    parent=self._context,
                    start_ns=self._clock.unix_ns(resume.began_at),
                    end_ns=self._clock.unix_ns(now),
                    attributes=resume.attributes,
                    links=resume.links,
                )
            )

    def _add(self, span: Span) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)

    def ended(
        self, model: str, children: Sequence[tuple[ResponseStream, Sequence[str]]], streams: bool, error: str | None
    ) -> None:
        """End the call: create and export all its spans.

        Args:
            children: response stream and workers of each sample.
            streams: True if the caller reads single chunks.
            error: error code of the call. None if it succeeded.
        """
        now = time.monotonic()
        for child in list(self._resumes):
            self._end_resume(child, now)
        request, sampling = self._request, self._request.sampling
        ends = [stream.end for stream, _ in children if stream.end is not None]
        attributes: dict[str, Attribute | None] = {
            names.OPERATION: OPERATION,
            names.PROVIDER: "rollbus",
            names.REQUEST_MODEL: model,
            names.RESPONSE_MODEL: model,
            names.RESPONSE_ID: request.request_id,
            names.REQUEST_ID: request.request_id,
            names.CHOICE_COUNT: sampling.n if sampling.n > 1 else None,
            names.MAX_TOKENS: sampling.max_tokens,
            names.TEMPERATURE: sampling.temperature,
            names.TOP_P: sampling.top_p,
            names.TOP_K: sampling.top_k if sampling.top_k > 0 else None,
            names.STREAM: streams,
            names.INPUT_TOKENS: request.prompt_len,
            names.OUTPUT_TOKENS: sum(stream.num_tokens for stream, _ in children),
            names.CACHED_TOKENS: ends[0].cached_tokens if ends else None,
            names.FINISH_REASONS: [str(end.finish_reason) for end in ends] or None,
            names.TIME_TO_FIRST_CHUNK: None if self._first_at is None else self._first_at - self._began_at,
            names.ATTEMPTS: max((stream.num_attempts for stream, _ in children), default=0),
            names.WORKERS: sorted({worker for _, workers in children for worker in workers}),
            names.WEIGHT_VERSIONS: list(self._versions) or None,
            names.ERROR_TYPE: error,
        }
        given = {name: value for name, value in attributes.items() if value is not None}
        call = Span(
            name=f"{OPERATION} {model}",
            kind="client",
            context=self._context,
            parent=self._parent,
            start_ns=self._clock.unix_ns(self._began_at),
            end_ns=self._clock.unix_ns(now),
            attributes=given,
            error=error,
        )
        self._tracer.export([call, *self._spans])

    def _attributes(self, child: AttemptMachine) -> dict[str, Attribute]:
        return {
            names.REQUEST_ID: self._request.request_id,
            names.CHILD: child.stream.child,
            names.ATTEMPT: child.stream.attempt,
        }
