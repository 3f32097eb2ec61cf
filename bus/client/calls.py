"""The caller's side of a request: its received results, until the caller reads them.

Two threads use these objects. The bus thread writes (`deliver`, `finish`); all other methods belong to the caller's
loop. Each field has one writer, so no lock is needed. The bus thread appends chunks before it sets the result. A reader
that reads the result first and the chunks second therefore misses none.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from msgspec.structs import force_setattr

from ...schemas.chunk import Chunk
from ...schemas.errors import RequestError
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.messages import encode
from ...schemas.request import GenerateRequest, expand_children
from ..protocol.fleet.unserved import WaitLimit
from ..protocol.stream.chunk_sizes import chunk_bytes
from ..tracing.spans import Tracer
from .call_spans import CallSpans, traced
from .generation import ChildResult, Generation, SampleOrigin, join_samples

__all__ = ["Call", "CallResult", "Inbox", "Unread"]


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


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of an ended call. The bus thread does not change it."""

    samples: Sequence[ChildResult]
    """Result of each child. Empty if the results are lost."""
    error: RequestError | None
    """Cause of the failure. None if every child has its terminal chunk."""
    ended_at: float = field(default_factory=time.monotonic)
    """Time of the end on `time.monotonic()`. The bus thread records it, because the caller's loop may be blocked."""


class Inbox:
    """Calls that have something new for the caller's loop. One callback serves all calls that arrive before it runs.

    Args:
        call_in_owner_loop: schedules a callback in the caller's loop. Called on the bus thread.
    """

    def __init__(self, call_in_owner_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_in_owner_loop = call_in_owner_loop
        # The bus thread appends, the caller's loop pops. Each open call is in it at most once, which bounds it.
        self._calls: deque[Call] = deque()
        self._is_due = False
        self.unread = Unread()

    def add(self, call: "Call") -> None:
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
        while self._calls:
            call = self._calls.popleft()
            call.is_due = False
            if call.other_loop is None:
                call.notify()
            else:
                call.notify_caller()


@dataclass(eq=False, slots=True)
class Call:
    """One request of the caller, from its opening to its end.

    The request's own limits bound the buffers. They fill on receipt, also if the caller does not read.

    Args:
        request: the caller's request.
        inbox: notifies the caller's loop.
        streams: True if the caller reads single chunks, False if it reads the complete `Generation`.
        tracer: starts the trace of the request. None: tracing is off.

    Raises:
        InvalidRequest: a seed is too large to give each sample its own seed.
    """

    request: GenerateRequest
    inbox: Inbox
    streams: bool
    tracer: InitVar[Tracer | None] = None
    origin: SampleOrigin | None = None
    """Key and time of the request. None in programs without a client."""
    # Set in the caller's loop before the bus thread sees the call. Not changed later.
    model: str = ""
    """Name of the model that serves the request. Empty until it is known."""
    wire_id: str = field(init=False)
    """Id of the request in messages."""
    is_mapped: bool = field(init=False)
    """True if that is not the caller's id."""
    children: list[GenerateRequest] = field(init=False)
    """Request of each sample."""
    payloads: list[bytes] = field(init=False)
    """Encoded `children`. Encoding here makes a request that cannot be encoded fail before it is submitted."""
    deadline_s: float = field(init=False)
    """Deadline on `time.monotonic()`."""
    spans: CallSpans | None = field(init=False, default=None)
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
    """Future of the waiting reader. An `asyncio.Event` costs twice as much time for each token."""
    _on_end: Callable[["Call"], None] | None = None
    # Written by the bus thread.
    delivered: int = 0
    """Bytes received. A streamed call frees them as the caller reads; other calls free them when the caller leaves."""
    result: CallResult | None = None
    """Result of the call. None while it is open. Set after the last chunk was appended."""
    _chunks: deque[tuple[Chunk, int]] = field(init=False, default_factory=deque)
    # Written by both threads, in the order that `Inbox` describes.
    is_due: bool = False

    def __post_init__(self, tracer: Tracer | None) -> None:
        """Create the child requests, their payloads and the deadline."""
        sent = self.request
        if tracer is not None:
            sent, self.spans = traced(tracer, sent)
        sent = sent.on_wire()
        self.wire_id = sent.request_id
        self.is_mapped = self.wire_id != self.request.request_id
        self.children = expand_children(sent)
        self.payloads = [encode(child) for child in self.children]
        self.deadline_s = time.monotonic() + self.timeout_s

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
                self._chunks.append((chunk, size))
        if self.streams and chunks:
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

    def notify_caller(self) -> None:
        """Call `notify` in the loop of the caller. Call this in the owner's loop."""
        if self.other_loop is None:
            self.notify()
            return
        # If that loop was closed, nobody waits.
        with contextlib.suppress(RuntimeError):
            self.other_loop.call_soon_threadsafe(self.notify)

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
                self._count_read(size)
                if self.is_mapped:
                    # Not `replace`, which checks the chunk again.
                    force_setattr(chunk, "request_id", self.request.request_id)
                return chunk
            if result is None:
                await self._wait_for_notification()
            elif result.error is None:
                return None
            else:
                raise result.error

    async def wait(self) -> None:
        """Wait until the call has ended, with or without an error."""
        while self.result is None:
            await self._wait_for_notification()

    async def _wait_for_notification(self) -> None:
        """Wait for `notify`. The caller of this method checks for earlier notifications."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abandon(self) -> None:
        """Stop reading this call and count its buffered results as read."""
        self._count_read(self.delivered - self._num_read_bytes)

    def _count_read(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        self.inbox.unread.read += num_bytes

    def generation(self) -> Generation:
        """Return the result of an ended call that was not streamed. A failed call has the tokens received before."""
        result = self.result or CallResult((), None)
        samples, seconds = result.samples, result.ended_at - (self.deadline_s - self.timeout_s)
        return join_samples(self.request, samples, self.error, self.model, self.origin, seconds)
