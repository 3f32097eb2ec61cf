"""The caller's side of a request: its received results until the caller reads them, and its spans.

Two threads use a call. The bus thread writes (`deliver`, `finish`); all other methods belong to the caller's loop. Each
field has one writer, so no lock is needed. The bus thread appends chunks before it sets the result. A reader that reads
the result first and the chunks second therefore misses none.
"""

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import force_setattr

from ...schemas.chunk import Chunk
from ...schemas.errors import RequestError
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.messages import encode
from ...schemas.request import GenerateRequest, expand_children
from ..protocol.attempt import events as on
from ..protocol.attempt.events import Instruction
from ..protocol.attempt.machine import AttemptMachine
from ..protocol.fleet.presence import WaitLimit
from ..protocol.stream.chunk_writer import chunk_bytes
from ..tracing import names
from ..tracing.spans import Attribute, Clock, Span, SpanContext, Tracer
from .generation import ChildResult, Generation, SampleKey, join_samples

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


class _Admission(NamedTuple):
    """A worker's offer to run the current attempt of a sample, some seconds after its publication."""

    attempt: int
    at: float
    waited_s: float
    worker: str
    lane: str | None
    """Lane of the queue. None: the client had placed the request."""


class CallSpans:
    """The spans of one sampled call: the call, its waits in the queue, and its resumes. Used on the bus thread.

    The client exports them at the end of the call. It makes them from the response streams, which have the lost
    attempts, and from the admissions and contexts that are recorded here. Attempts pass the context of the call to
    their workers. Attempts that follow a lost attempt pass the context of their resume.

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
        # By child, in the order of time. A lost attempt that no other one follows has no resume.
        self._admissions: defaultdict[int, list[_Admission]] = defaultdict(list)
        self._resumes: defaultdict[int, list[SpanContext]] = defaultdict(list)

    def context_of(self, child: int) -> SpanContext | None:
        """Return the trace context of the next attempt of `child`. None: the context of the first attempt."""
        return self._resumes[child][-1] if child in self._resumes else None

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
        stream = child.stream
        match instruction:
            case on.RecordAdmission(waited_s) if len(admitted := self._admissions[stream.child]) < MAX_SPANS:
                lane = None if child.is_placed else str(child.lane)
                admitted.append(_Admission(stream.attempt, child.since, waited_s, child.worker or "", lane))
            case on.CountLoss(is_retried=True):
                self._resumes[stream.child].append(self._context.child())

    def _of_child(self, child: AttemptMachine) -> Iterator[Span]:
        """Yield the waits and the resumes of an ended child."""
        index, lost = child.stream.child, child.stream.lost
        resumes, admitted = self._resumes[index], deque(self._admissions[index])
        parent: SpanContext = self._context
        latest: SpanContext | None = None
        ends = [*(each.at for each in lost[1:]), child.since]
        for number, until in enumerate([*(each.attempt for each in lost[: len(resumes)]), math.inf]):
            while admitted and admitted[0].attempt <= until:
                attempt, at, waited_s, worker, lane = admitted.popleft()
                attributes = self._attributes(index, attempt)
                attributes |= {names.MESSAGING_SYSTEM: "nats", names.MESSAGING_OPERATION: "send", names.WORKER: worker}
                attributes |= {} if lane is None else {names.LANE: lane}
                latest, name = parent.child(), f"queue {self._request.model or ''}".rstrip()
                fields = {"context": latest, "parent": parent, "attributes": attributes}
                yield self._span(name, at - waited_s, at, kind="producer", **fields)
            if number < len(resumes):
                one, links = lost[number], () if latest is None else (latest,)
                attributes = self._attributes(index, one.attempt + 1) | {names.ERROR_TYPE: one.reason}
                attributes |= {names.LOST_WORKER: one.worker} if one.worker else {}
                parent = latest = resumes[number]
                fields = {"context": parent, "parent": self._context, "attributes": attributes, "links": links}
                yield self._span("resume", one.at, ends[number], kind="internal", **fields)

    def _attributes(self, index: int, attempt: int) -> dict[str, Attribute]:
        return {names.REQUEST_ID: self._request.request_id, names.CHILD: index, names.ATTEMPT: attempt}

    def _span(self, name: str, start: float, end: float, **fields: Any) -> Span:
        """Return a span. `start` and `end` are times of `time.monotonic()`."""
        return Span(name=name, start_ns=self._clock.unix_ns(start), end_ns=self._clock.unix_ns(end), **fields)

    def ended(self, model: str, children: Sequence[AttemptMachine], streams: bool, error: str | None) -> None:
        """End the call: create and export all its spans.

        Args:
            children: the samples, which have ended.
            streams: True if the caller reads single chunks.
            error: error code of the call. None if it succeeded.
        """
        request, sampling = self._request, self._request.sampling
        streamed = [child.stream for child in children]
        ends = [stream.end for stream in streamed if stream.end is not None]
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
            names.OUTPUT_TOKENS: sum(stream.num_tokens for stream in streamed),
            names.CACHED_TOKENS: ends[0].cached_tokens if ends else None,
            names.FINISH_REASONS: [str(end.finish_reason) for end in ends] or None,
            names.TIME_TO_FIRST_CHUNK: None if self._first_at is None else self._first_at - self._began_at,
            names.ATTEMPTS: max((stream.num_attempts for stream in streamed), default=0),
            names.WORKERS: sorted({worker for child in children for worker in child.workers}),
            names.WEIGHT_VERSIONS: list(self._versions) or None,
            names.ERROR_TYPE: error,
        }
        given = {name: value for name, value in attributes.items() if value is not None}
        fields = {"kind": "client", "context": self._context, "parent": self._parent, "error": error}
        call = self._span(f"{OPERATION} {model}", self._began_at, time.monotonic(), attributes=given, **fields)
        self._tracer.export([call, *islice(chain.from_iterable(map(self._of_child, children)), MAX_SPANS)])


@dataclass(slots=True)
class Unread:
    """Bytes of results that were delivered to the callers of one client and not read yet."""

    delivered: int = 0
    """Bytes delivered. Written by the bus thread."""
    read: int = 0
    """Bytes read. Written in the caller's loop."""
    dropped: int = 0
    """Bytes delivered to calls that their callers had abandoned. Written by the bus thread."""

    @property
    def num_bytes(self) -> int:
        """Unread bytes, possibly with a short delay: another thread writes the counters."""
        return self.delivered - self.read - self.dropped


class CallResult(msgspec.Struct, frozen=True):
    """The result of an ended call. The bus thread does not change it."""

    samples: Sequence[ChildResult]
    """Result of each child. Empty if the results are lost."""
    error: RequestError | None
    """Cause of the failure. None if every child has its terminal chunk."""
    ended_at: float = msgspec.field(default_factory=time.monotonic)
    """Time of the end on `time.monotonic()`. The bus thread records it, because the caller's loop may be blocked."""


class Inbox:
    """Calls that have something new for the caller's loop. One callback serves all calls that arrive before it runs.

    Args:
        call_in_owner_loop: schedules a callback in the caller's loop. Called on the bus thread.
    """

    def __init__(self, call_in_owner_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_in_owner_loop = call_in_owner_loop
        # The bus thread appends, the caller's loop pops. Each open call is in it at most once, which bounds it.
        self._calls: deque[Call | SharedInbox] = deque()
        self._is_due = False
        self.unread = Unread()
        self.shared: set[SharedInbox] = set()
        """Open inboxes that notify their readers through this one."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of results that no caller has read. Any thread may read this property."""
        return self.unread.num_bytes + sum([one.unread.num_bytes for one in tuple(self.shared)])

    def add(self, call: "Call | SharedInbox") -> None:
        """Schedule `call.notify` in the caller's loop. Call this on the bus thread."""
        if call.is_due:
            return
        call.is_due = True
        self._calls.append(call)
        if not self._is_due:
            self._is_due = True
            self._call_in_owner_loop(self._notify_calls)

    def _notify_calls(self) -> None:
        # Clear each flag before reading the data that it stands for. Later changes set it again.
        self._is_due = False
        try:
            while self._calls:
                call = self._calls.popleft()
                call.is_due = False
                if call.other_loop is None:
                    call.notify()
                else:
                    call_in(call.other_loop, call.notify)
        finally:
            if self._calls:  # a callback of the caller has failed
                asyncio.get_running_loop().call_soon(self._notify_calls)


class SharedInbox:
    """The unread chunks of several calls with one reader. One wake-up serves all chunks that arrive before it.

    The reader must `close` it.

    Args:
        inbox: notifies the reader, and each call of its end.
        notify: wakes the reader. Called in the reader's loop.
    """

    def __init__(self, inbox: Inbox, notify: Callable[[], None]) -> None:
        self._inbox = inbox
        self.notify = notify
        self.other_loop: asyncio.AbstractEventLoop | None = None
        """As in `Call`."""
        # Its own counters: chunks are counted as read together. Sizes beside them would cost a tuple for each.
        self.unread = Unread()
        self.chunks: deque[Chunk] = deque()
        """The bus thread appends, the reader's loop pops. The limits of the calls bound it."""
        self.is_due = False
        inbox.shared.add(self)

    def add(self, call: "Call") -> None:
        """Notify the reader of chunks of a call, or the call of its end. Call this on the bus thread."""
        if call.result is not None:
            self._inbox.add(call)
        elif not self.is_due:
            self.other_loop = call.other_loop
            self._inbox.add(self)

    def take(self) -> list[Chunk]:
        """Return all chunks, and count them as read. Call this in the reader's loop."""
        # The bus thread counts a chunk before it appends it. At most one is counted too early, until the next call.
        self.unread.read = self.unread.delivered
        return [self.chunks.popleft() for _ in range(len(self.chunks))]

    def close(self) -> None:
        """Count nothing of these calls any more. Call this in the reader's loop."""
        self._inbox.shared.discard(self)


def call_in(loop: asyncio.AbstractEventLoop | None, callback: Callable[[], None]) -> None:
    """Call `callback` in the loop of another thread. None: call it here."""
    if loop is None:
        callback()
        return
    # If that loop was closed, nobody waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


class Call(msgspec.Struct, eq=False):
    """One request of the caller, from its opening to its end.

    The request's own limits bound the buffers. They fill on receipt, also if the caller does not read.

    Args:
        request: the caller's request.
        inbox: notifies the caller's loop. A shared one also gets the chunks.
        streams: True if the caller reads single chunks, False if it reads the complete `Generation`.
        tracer: starts the trace of the request. None: tracing is off.

    Raises:
        InvalidRequest: a seed is too large to give each sample its own seed.
    """

    request: GenerateRequest
    inbox: Inbox | SharedInbox
    streams: bool
    tracer: Tracer | None = None
    key: SampleKey | None = None
    """Key of the first sample. None in programs without a client."""
    opened_at: float = msgspec.field(default_factory=time.time)
    """Unix time of the opening."""
    # Set in the caller's loop before the bus thread sees the call. Not changed later.
    model: str = ""
    """Name of the model that serves the request. Empty until it is known."""
    wire_id: str = ""
    """Id of the request in messages."""
    is_mapped: bool = False
    """True if that is not the caller's id."""
    children: Sequence[GenerateRequest] = ()
    """Request of each sample."""
    payloads: Sequence[bytes] = ()
    """Encoded `children`, until the call is submitted. A request that cannot be encoded fails here, before that."""
    deadline_s: float = 0.0
    """Deadline on `time.monotonic()`."""
    spans: CallSpans | None = None
    """Spans of the trace. None if the request is not sampled."""
    wait_limit: WaitLimit | None = None
    """Limit for the time without a serving worker before the first chunk. None: the request's deadline."""
    other_loop: asyncio.AbstractEventLoop | None = None
    """Loop of a caller that is not in the owner's loop but in that of another thread."""
    # Written in the caller's loop.
    is_submitted: bool = False
    is_aborted: bool = False
    """True if the caller abandoned the call before it was submitted."""
    _num_read_bytes: int = 0
    _waiter: asyncio.Future[None] | None = None
    """Future of the last wait of the reader. An `asyncio.Event` costs twice as much time for each token."""
    _on_end: Callable[["Call"], None] | None = None
    # Written by the bus thread.
    delivered: int = 0
    """Bytes received. A streamed call frees them as the caller reads; other calls free them when the caller leaves."""
    result: CallResult | None = None
    """Result of the call. None while it is open. Set after the last chunk was appended."""
    _chunks: deque[tuple[Chunk, int]] | None = None
    """Chunks that the caller has not read. None before the first one, because an empty deque has 600 bytes."""
    _shared: deque[Chunk] | None = None
    """Chunks of the shared inbox. None: the call has its own reader."""
    # Written by both threads, in the order that `Inbox` describes.
    is_due: bool = False

    def __post_init__(self) -> None:
        """Create the child requests, their payloads and the deadline."""
        sent = self.request
        if self.tracer is not None:
            sent, self.spans = traced(self.tracer, sent)
        sent = sent.on_wire()
        self.wire_id = sent.request_id
        self.is_mapped = self.wire_id != self.request.request_id
        self.children = expand_children(sent)
        self.payloads = [encode(child) for child in self.children]
        self.deadline_s = time.monotonic() + self.timeout_s
        if isinstance(self.inbox, SharedInbox):
            self._shared = self.inbox.chunks

    def __repr__(self) -> str:
        """Return one line with the state."""
        state = "open" if self.result is None else "ended" if self.error is None else self.error.code
        return f"<Call {self.wire_id} {state} children={len(self.children)}>"

    @property
    def timeout_s(self) -> float:
        """Seconds from the opening of the call to its deadline."""
        return DEFAULT_TIMEOUT_S if self.request.timeout_s is None else self.request.timeout_s

    @property
    def error(self) -> RequestError | None:
        """Cause of the failure. None while the call is open or if it succeeded."""
        return None if self.result is None else self.result.error

    # On the bus thread.

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Add validated chunks of one child. The call must be open."""
        if self.spans is not None:
            self.spans.add(chunks)
        for chunk in chunks:
            size = chunk_bytes(chunk)
            self.delivered += size
            self.inbox.unread.delivered += size
            if self.streams:
                if self.is_mapped:
                    # Not `replace`, which checks the chunk again.
                    force_setattr(chunk, "request_id", self.request.request_id)
                if self._shared is not None:
                    self._shared.append(chunk)
                elif self._chunks is None:
                    self._chunks = deque([(chunk, size)])
                else:
                    self._chunks.append((chunk, size))
        if self.streams and chunks and not self.is_due:
            self.inbox.add(self)

    def finish(self, result: CallResult) -> None:
        """End the call. No chunk is delivered afterwards."""
        if result.error is not None:
            result.error.request_id = self.request.request_id
        self.result = result
        self.inbox.add(self)

    def count_dropped(self) -> None:
        """Count the bytes as dropped that arrived after the caller had abandoned the call."""
        self.inbox.unread.dropped += self.delivered - self._num_read_bytes

    # In the caller's loop.

    def notify(self) -> None:
        """Wake the task that waits for this call."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.result is not None and self._on_end is not None:
            callback, self._on_end = self._on_end, None
            callback(self)

    def when_ended(self, callback: Callable[["Call"], None]) -> None:
        """Call `callback` once when the call has ended, or immediately if it has ended."""
        self._on_end = callback
        self.notify()

    async def next_chunk(self) -> Chunk | None:
        """Wait for the next chunk; return None after the last one. Chunks of several children are interleaved.

        Raises:
            RequestError: the request failed. All chunks received before have been returned.
        """
        while True:
            # Read the result before the chunks: the bus thread appends all chunks before it sets the result.
            result = self.result
            if self._chunks:
                chunk, size = self._chunks.popleft()
                self._num_read_bytes += size
                self.inbox.unread.read += size
                return chunk
            if result is None:
                await self._next_notification()
            elif result.error is None:
                return None
            else:
                raise result.error

    async def next_chunks(self, most_bytes: int) -> list[Chunk]:
        """Wait for chunks and return those that have come, up to about `most_bytes`; none after the last one.

        Raises:
            RequestError: as `next_chunk`.
        """
        first, num_bytes = await self.next_chunk(), 0
        found = [] if first is None else [first]
        while self._chunks and num_bytes < most_bytes:
            chunk, size = self._chunks.popleft()
            num_bytes += size
            found.append(chunk)
        self._count_read(num_bytes)
        return found

    async def wait(self) -> None:
        """Wait until the call has ended, with or without an error."""
        while self.result is None:
            await self._next_notification()

    def _next_notification(self) -> asyncio.Future[None]:
        """Return a future that `notify` completes. The caller of this method checks for earlier notifications."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def abandon(self) -> None:
        """Stop reading this call and count its buffered results as read."""
        if self._shared is not None:
            # The shared inbox counts what its reader takes.
            self._num_read_bytes = self.delivered
        self._count_read(self.delivered - self._num_read_bytes)

    def _count_read(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        self.inbox.unread.read += num_bytes

    def generation(self) -> Generation:
        """Return the result of an ended call that was not streamed. A failed call has the tokens received before."""
        result = self.result or CallResult((), None)
        seconds = result.ended_at - (self.deadline_s - self.timeout_s)
        times = (None, None) if self.key is None else (self.opened_at, self.opened_at + seconds)
        return join_samples(self.request, result.samples, result.error, self.model, self.key, times)
