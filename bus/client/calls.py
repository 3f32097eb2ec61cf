"""The caller's end of a request: what has come for it, until the caller takes it.

Two threads meet here. The bus thread writes (`deliver`, `finish`); everything else belongs to the caller's loop. Each
field has one writer, and the order of writing makes locks needless: chunks are appended before the ending is set, so
that who reads the ending first and the chunks then has missed nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from ...schemas.chunk import Chunk
from ...schemas.errors import RequestError
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.messages import encode
from ...schemas.request import GenerateRequest, expand_children
from ..protocol.stream.chunk_sizes import chunk_bytes
from ..tracing.spans import Tracer
from .call_spans import CallSpans, traced
from .generation import ChildResult, Generation, join_samples

__all__ = ["Call", "CallResult", "Inbox", "Unread"]


@dataclass(slots=True)
class Unread:
    """Bytes of results that were delivered to the callers of one client and that none has taken."""

    delivered: int = 0
    """Written by the bus thread."""
    read: int = 0
    """Written in the caller's loop."""
    dropped: int = 0
    """Delivered to calls that their callers had left; written by the bus thread."""

    @property
    def num_bytes(self) -> int:
        """At this moment, or a moment ago."""
        return self.delivered - self.read - self.dropped


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended; the bus thread touches none of this any more."""

    samples: Sequence[ChildResult]
    """What came of each child; empty where that is lost."""
    error: RequestError | None
    """Why it failed; None if every child has its terminal chunk."""
    ended_at: float = field(default_factory=time.monotonic)
    """On `time.monotonic()`; taken here, as the caller's loop may be blocked when the call ends."""


class Inbox:
    """Calls with news for the caller's loop: however many come while it is blocked, one callback waits for it.

    Args:
        tell: has a callback called in the caller's loop; to be called on the bus thread.
    """

    def __init__(self, call_in_owner_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_in_owner_loop = call_in_owner_loop
        # Appended to by the bus thread, taken from in the caller's loop. Bounded by the live calls: each is in it once.
        self._calls: deque[Call] = deque()
        self._is_due = False
        self.unread = Unread()

    def add(self, call: "Call") -> None:
        """Have `call` notice its news in the caller's loop; on the bus thread."""
        if call.is_due:
            return
        call.is_due = True
        self._calls.append(call)
        if not self._is_due:
            self._is_due = True
            self._call_in_owner_loop(self._notify_calls)

    def _notify_calls(self) -> None:
        # Each flag falls before what it stands for is looked at: news that come later raise it again.
        self._is_due = False
        while self._calls:
            call = self._calls.popleft()
            call.is_due = False
            call.notify()


@dataclass(eq=False, slots=True)
class Call:
    """One request of the caller, from its opening to its end.

    Buffers are bounded by what the request itself may produce; they fill on receipt, whether or not the caller reads.

    Args:
        request: as the caller gave it.
        inbox: tells the caller's loop of news.
        streams: the caller takes chunks one by one; otherwise it takes the finished `Generation`.
        tracer: begins its trace; None: tracing is off.

    Raises:
        InvalidRequest: its samples cannot be told apart: a seed is too large.
    """

    request: GenerateRequest
    inbox: Inbox
    streams: bool
    tracer: InitVar[Tracer | None] = None
    # Set in the caller's loop before the bus thread sees the call, and not changed any more.
    model: str = ""
    """Which model serves it; empty until that is known."""
    children: list[GenerateRequest] = field(init=False)
    """The request of each sample."""
    payloads: list[bytes] = field(init=False)
    """These encoded: here, so that what cannot be encoded fails before anybody else sees it."""
    deadline_s: float = field(init=False)
    """On `time.monotonic()`."""
    spans: CallSpans | None = field(init=False, default=None)
    """Of its trace; None: it is not sampled."""
    # In the caller's loop.
    is_submitted: bool = False
    is_aborted: bool = False
    """The caller gave it up before it was submitted."""
    _num_read_bytes: int = 0
    _waiter: asyncio.Future[None] | None = None
    """Of the one who reads this call, while it waits: an `asyncio.Event` would cost a token twice as much."""
    _on_end: Callable[["Call"], None] | None = None
    # By the bus thread.
    delivered: int = 0
    """Bytes that came; those of a streamed call leave as they are taken, all others when the caller leaves the call."""
    result: CallResult | None = None
    """How it ended; None while it is open. Set after the last chunk was appended."""
    _chunks: deque[tuple[Chunk, int]] = field(init=False, default_factory=deque)
    # By both, in the order that `Inbox` explains.
    is_due: bool = False

    def __post_init__(self, tracer: Tracer | None) -> None:
        """Prepare what is published."""
        sent = self.request
        if tracer is not None:
            sent, self.spans = traced(tracer, sent)
        self.children = expand_children(sent)
        self.payloads = [encode(child) for child in self.children]
        self.deadline_s = time.monotonic() + self.timeout_s

    def __repr__(self) -> str:
        """One line with the state."""
        state = "open" if self.result is None else "ended" if self.error is None else self.error.code
        return f"<Call {self.request.request_id} {state} children={len(self.children)}>"

    @property
    def timeout_s(self) -> float:
        """Seconds from its opening to its deadline."""
        return DEFAULT_TIMEOUT_S if self.request.timeout_s is None else self.request.timeout_s

    @property
    def error(self) -> RequestError | None:
        """Why the call failed; None while it runs or when it succeeded."""
        return None if self.result is None else self.result.error

    # On the bus thread.

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Hand over a child's chunks; they have been checked, and the call has not ended."""
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
        """End the call; nothing is delivered any more."""
        self.result = result
        self.inbox.add(self)

    def count_dropped(self) -> None:
        """Count as dropped what came after the caller had left the call."""
        self.inbox.unread.dropped += self.delivered - self._num_read_bytes

    # In the caller's loop.

    def notify(self) -> None:
        """Wake who waits for this call."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.result is not None and self._on_end is not None:
            callback, self._on_end = self._on_end, None
            callback(self)

    def when_ended(self, callback: Callable[["Call"], None]) -> None:
        """Call `callback` once when the call has ended; at once if it has."""
        self._on_end = callback
        self.notify()

    async def next_chunk(self) -> Chunk | None:
        """Wait for the next chunk, those of several children interleaved; None when all have been taken.

        Raises:
            RequestError: the request failed, and what came before has been taken.
        """
        while True:
            # Before the chunks: what came ahead of the ending is seen by then.
            result = self.result
            if self._chunks:
                chunk, size = self._chunks.popleft()
                self._count_read(size)
                return chunk
            if result is None:
                await self._wait_for_notification()
            elif result.error is None:
                return None
            else:
                raise result.error

    async def wait(self) -> None:
        """Wait until the call has ended, well or not."""
        while self.result is None:
            await self._wait_for_notification()

    async def _wait_for_notification(self) -> None:
        """Wait for `notify`. The caller checks for earlier notifications itself."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abandon(self) -> None:
        """Take no more of it: what has come counts as taken."""
        self._count_read(self.delivered - self._num_read_bytes)

    def _count_read(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        self.inbox.unread.read += num_bytes

    def generation(self) -> Generation:
        """The result of a call that has ended and was not streamed; on failure what had arrived."""
        samples = () if self.result is None else self.result.samples
        return join_samples(self.request, samples, self.error)
