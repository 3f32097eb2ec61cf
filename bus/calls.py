"""What a client knows of one request of its caller: the streams of its children, and how it ended."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from bus.generation import Generation
from bus.protocol.assembly import Assembly
from schemas.chunk import Chunk, FinishReason
from schemas.errors import ErrorCode, RemoteProtocolError, RequestError, RequestFailed, request_error
from schemas.messages import RequestKey
from schemas.request import GenerateRequest, expand_children

__all__ = ["Call"]


class Call:
    """One request of the caller, from its publication to its end.

    Buffers are bounded by what the request itself may produce; they fill on receipt, whether or not the caller reads.

    Args:
        request: as the caller gave it, with `model` filled in.
        attempt: tells its chunks from those of an earlier call of the same id.
        streams: the caller takes chunks one by one; otherwise it takes the finished `Generation`.
        on_end: called once, when the call has ended.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        streams: bool,
        attempt: int = 0,
        on_end: Callable[["Call"], None] | None = None,
    ) -> None:
        self.request = request
        self.attempt = attempt
        self.children = expand_children(request)
        self.workers: list[str | None] = [None] * len(self.children)
        """Which worker admitted each child; None before."""
        self.error: RequestError | None = None
        """Why the call failed; None while it runs or when it succeeded."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call at its deadline."""
        self._made_at = time.monotonic()
        self._streams = streams
        self._on_end = on_end
        self._assemblies = [Assembly(child, keep=not streams) for child in self.children]
        self._chunks: deque[Chunk] = deque()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        """One line with the state."""
        state = self.error.code if self.error else ("ended" if self.has_ended else "open")
        return f"<Call {self.request.request_id} {state} children={len(self.children)} workers={self.workers}>"

    @property
    def has_ended(self) -> bool:
        """All children have their terminal chunk, or the call has failed as a whole."""
        return self.error is not None or all(assembly.end is not None for assembly in self._assemblies)

    def key(self, child: int) -> RequestKey:
        """The key of a child on the wire."""
        return RequestKey(self.request.request_id, self.attempt, child)

    def open_children(self) -> list[int]:
        """Children whose terminal chunk has not come."""
        return [child for child, assembly in enumerate(self._assemblies) if assembly.end is None]

    @property
    def is_unadmitted(self) -> bool:
        """No worker has said yet that it took on some child."""
        return any(self.workers[child] is None for child in self.open_children())

    @property
    def age_s(self) -> float:
        """Seconds since the call was made."""
        return time.monotonic() - self._made_at

    def is_at(self, worker: str) -> bool:
        """Some open child was admitted by `worker`."""
        return any(self.workers[child] == worker for child in self.open_children())

    def receive(self, chunk: Chunk, worker: str) -> None:
        """Take a child's next chunk; one that breaks the protocol fails the call."""
        if self.has_ended:
            return
        self.workers[chunk.child] = worker
        try:
            self._assemblies[chunk.child].add(chunk)
        except RemoteProtocolError as exc:
            self.fail(
                RequestFailed(
                    code=ErrorCode.PROTOCOL_ERROR, message=f"worker {worker}: {exc}", request_id=chunk.request_id
                )
            )
            return
        if chunk.error is not None:
            error = chunk.error
            self.error = request_error(
                error.code,
                error.message,
                request_id=chunk.request_id,
                field=error.field,
                problem=error.problem,
                allowed=error.allowed,
            )
        elif self._streams:
            self._chunks.append(chunk)
        self._notify()

    def fail(self, error: RequestError) -> None:
        """End the call with `error`; without effect once it has ended."""
        if not self.has_ended:
            self.error = error
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        if self.has_ended:
            if self.timer is not None:
                self.timer.cancel()
            if self._on_end is not None:
                self._on_end(self)
                self._on_end = None

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
        siblings = tuple(self._child_generation(child) for child in range(1, len(self.children)))
        return self._child_generation(0, siblings)

    def _child_generation(self, child: int, siblings: tuple[Generation, ...] = ()) -> Generation:
        assembly = self._assemblies[child]
        end = assembly.end
        worker = self.workers[child]
        return Generation(
            request_id=self.request.request_id,
            child=child,
            prompt_len=self.request.prompt_len,
            start=assembly.start,
            finish_reason=FinishReason.ERROR if end is None or self.error is not None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            cached_tokens=None if end is None else end.cached_tokens,
            worker_ids=() if worker is None else (worker,),
            siblings=siblings,
            error=self.error,
            **assembly.arrays(),
        )
