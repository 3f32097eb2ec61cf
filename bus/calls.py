"""What a client knows of one request of its caller: the streams of its children, and how it ended."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from bus.generation import Generation
from bus.protocol.stream import Stream
from schemas.chunk import Chunk, FinishReason
from schemas.errors import RequestError
from schemas.messages import RequestKey
from schemas.request import GenerateRequest, expand_children

__all__ = ["Call", "ChildCall"]


class ChildCall:
    """One sample of a request: its stream, and where its current attempt is."""

    def __init__(self, request: GenerateRequest, *, child: int, attempt: int, keep: bool) -> None:
        self.child = child
        self.stream = Stream(request, child=child, attempt=attempt, keep=keep)
        self.to_publish = request
        """What the current attempt asks for."""
        self.is_published = False
        """The current attempt is on its way or in the hands of a worker, not waiting for one."""
        self.last_error: RequestError | None = None
        """Why the attempt before this one was given up; None for the first."""
        self.worker: str | None = None
        """Who admitted the current attempt; None before."""
        self.workers: list[str] = []
        """Who admitted its attempts, in order."""
        self.engine_deaths = 0
        """Attempts that ended with the death of their engine."""
        self._since = time.monotonic()

    @property
    def key(self) -> RequestKey:
        """Of the current attempt, on the wire."""
        return RequestKey(self.stream.request_id, self.stream.attempt, self.child)

    @property
    def is_open(self) -> bool:
        """More is to come."""
        return self.stream.end is None

    def admit(self, worker: str) -> bool:
        """Note who serves the current attempt; False if it is another's."""
        if self.worker is None:
            self.worker = worker
            self.workers.append(worker)
        return self.worker == worker

    def publish(self) -> None:
        """Note that the current attempt is on its way."""
        self.is_published = True
        self._since = time.monotonic()

    def give_up(self, error: RequestError) -> GenerateRequest | Chunk:
        """End the current attempt because of `error`; returns what to publish for the next, or the terminal chunk."""
        self.worker = None
        self.is_published = False
        self.last_error = error
        self._since = time.monotonic()
        more = self.stream.next_attempt()
        if not isinstance(more, Chunk):
            self.to_publish = more
        return more

    @property
    def waited_s(self) -> float:
        """Seconds since the current attempt was published, or since the one before it was given up."""
        return time.monotonic() - self._since


class Call:
    """One request of the caller, from its publication to its end.

    Buffers are bounded by what the request itself may produce; they fill on receipt, whether or not the caller reads.

    Args:
        request: as the caller gave it.
        attempt: tells its chunks from those of an earlier call of the same id.
        streams: the caller takes chunks one by one; otherwise it takes the finished `Generation`.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        streams: bool,
        attempt: int = 0,
    ) -> None:
        self.request = request
        self.model = ""
        """Which model serves it; empty until that is known."""
        self.children = [
            ChildCall(child, child=index, attempt=attempt, keep=not streams)
            for index, child in enumerate(expand_children(request))
        ]
        self.error: RequestError | None = None
        """Why the call failed; None while it runs or when it succeeded."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call at its deadline."""
        self._streams = streams
        self._on_end: Callable[[Call], None] | None = None
        self._chunks: deque[Chunk] = deque()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        """One line with the state."""
        state = self.error.code if self.error else ("ended" if self.has_ended else "open")
        return f"<Call {self.request.request_id} {state} children={len(self.children)}>"

    @property
    def has_ended(self) -> bool:
        """All children have their terminal chunk, or the call has failed as a whole."""
        return self.error is not None or not any(child.is_open for child in self.children)

    @property
    def is_unadmitted(self) -> bool:
        """Some child has no worker."""
        return any(child.is_open and child.worker is None for child in self.children)

    @property
    def next_attempt(self) -> int:
        """A number that no attempt of any child has."""
        return max(child.stream.attempt for child in self.children) + 1

    def deliver(self, chunks: list[Chunk]) -> None:
        """Hand a child's chunks to the caller; they have been checked."""
        if self._streams:
            self._chunks.extend(chunks)
        if chunks:
            self._notify()

    def fail(self, error: RequestError) -> None:
        """End the call with `error`; without effect once it has ended."""
        if not self.has_ended:
            self.error = error
            self._notify()

    def when_ended(self, callback: Callable[["Call"], None]) -> None:
        """Call `callback` once when the call has ended; at once if it has."""
        self._on_end = callback
        if self.has_ended:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        if self.has_ended:
            if self.timer is not None:
                self.timer.cancel()
            callback, self._on_end = self._on_end, None
            if callback is not None:
                callback(self)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come, those of several children interleaved.

        Raises:
            RequestError: the request failed; what came before has been yielded.
        """
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self.has_ended:
                break
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error

    async def wait(self) -> None:
        """Wait until the call has ended, well or not."""
        while not self.has_ended:
            self._changed.clear()
            await self._changed.wait()

    def generation(self) -> Generation:
        """The result of a call that has ended, child 0 with its siblings; on failure what had arrived."""
        first, *others = self.children
        return self._child_generation(first, tuple(self._child_generation(child) for child in others))

    def _child_generation(self, child: ChildCall, siblings: tuple[Generation, ...] = ()) -> Generation:
        stream = child.stream
        end = stream.end
        return Generation(
            request_id=self.request.request_id,
            child=child.child,
            prompt_len=self.request.prompt_len,
            start=stream.start,
            finish_reason=FinishReason.ERROR if end is None or self.error is not None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            cached_tokens=None if end is None else end.cached_tokens,
            attempts=stream.num_attempts,
            worker_ids=tuple(child.workers),
            exact=stream.is_exact,
            siblings=siblings,
            error=self.error,
            **stream.arrays(),
        )
