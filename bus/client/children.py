"""The bus thread's side of a request: its open call, and the state of each child request.

A request for n samples is n requests to the fleet, its children. If one of them fails, all of them end.
"""

import asyncio
import time
from collections.abc import Sequence

from ...schemas.errors import ErrorCode, RequestError, RequestFailed
from ..protocol.attempt.events import Instruction
from ..protocol.attempt.machine import AttemptMachine
from ..protocol.attempt.states import TIMED
from ..protocol.placement.prefix_index import PrefixScope
from ..protocol.stream.response_stream import ResponseStream
from .calls import Call, CallResult
from .generation import ChildResult

__all__ = ["ChildRequest", "OpenCall"]


class OpenCall:
    """A call while it is open.

    Args:
        call: the caller's side of the request.
        serial: number of the call, unique within this client.
        attempt: number of the first attempt. Above 0 if late chunks of an earlier call with the same id may arrive.
    """

    def __init__(self, call: Call, *, serial: int, attempt: int) -> None:
        self.call = call
        self.serial = serial
        self.request_id = call.wire_id
        self.model = call.model
        self.first_attempt = attempt
        self.children = [
            ChildRequest(self, ResponseStream(request, child=index, attempt=attempt, keep=not call.streams), payload)
            for index, (request, payload) in enumerate(zip(call.children, call.payloads, strict=True))
        ]
        self.target_version: int | None = None
        """Target weight version of the model when the call was submitted. None until it is known, and if the request
        does not need it."""
        self.pieces: tuple[PrefixScope, tuple[int, ...]] | None = None
        """Hashes of the prompt, with their scope. None until they are computed."""
        self.has_ended = False
        """True if all children have their terminal chunk, or if the call has failed."""
        self.is_stopping = False
        """True if the children end with their present tokens and are not published again."""
        self.timer: asyncio.TimerHandle | None = None
        """Timer that ends the call at its deadline."""

    @property
    def next_attempt(self) -> int:
        """Attempt number that no child has used."""
        return max(child.stream.attempt for child in self.children) + 1

    def finish(self, error: RequestError | None = None) -> None:
        """End the caller's side of the call. A second call of this method has no effect."""
        if self.has_ended:
            return
        self.has_ended = True
        if self.timer is not None:
            self.timer.cancel()
        if (spans := self.call.spans) is not None:
            children = [(child.stream, child.workers) for child in self.children]
            spans.ended(self.model, children, self.call.streams, None if error is None else error.code)
        self.call.finish(CallResult([child.result() for child in self.children], error))

    def clear(self) -> None:
        """Remove the children, which have all ended.

        The children refer to this call, and the call refers to its result. Without this, a large result would stay in
        memory until the garbage collector finds the cycle.
        """
        self.children.clear()

    def failure(self, code: ErrorCode, message: str) -> RequestFailed:
        """Return an error of this call."""
        return RequestFailed(code=code, message=message, request_id=self.request_id)


class ChildRequest(AttemptMachine):
    """A child request with its open call."""

    def __init__(self, open_call: OpenCall, stream: ResponseStream, payload: bytes) -> None:
        super().__init__(stream, payload, now=time.monotonic(), deadline=open_call.call.deadline_s)
        self.open_call = open_call
        self.timer: asyncio.TimerHandle | None = None
        """Timer of the present state, if that state has a time limit."""
        self.may_wait = False
        """True if the current attempt may wait at its worker for a slot, and the worker has offered it at most once."""

        self.avoids_queue = False
        """True if a silent worker had it. It then goes directly to another worker, if one serves."""

    @property
    def has_begun(self) -> bool:
        """True if the engine of its worker may have received the request."""
        return not self.may_wait or self.has_token

    def stop_timer(self) -> None:
        """Cancel the timer if the state that it belongs to has ended."""
        if self.timer is not None and self.state not in TIMED:
            self.timer.cancel()
            self.timer = None

    @property
    def token(self) -> str:
        """Id of this child request, unique among all calls of the client."""
        return f"{self.open_call.serial}.{self.stream.child}"

    @property
    def msg_id(self) -> str:
        """Id of the current attempt, unique within the client."""
        return f"{self.open_call.serial}.{self.stream.attempt}.{self.stream.child}"

    def payload(self) -> bytes:
        """Return the encoded request of the current attempt. A resumed request has the trace context of its resume."""
        spans = self.open_call.call.spans
        if self._payload is None and spans is not None and (context := spans.context_of(self.stream.child)):
            self._request = self._request.in_trace(context.traceparent, context.tracestate)
        return super().payload()

    def note(self, instructions: Sequence[Instruction]) -> None:
        """Record instructions for the spans of the call, if the call is traced."""
        spans = self.open_call.call.spans
        if spans is not None:
            for instruction in instructions:
                spans.note(self, instruction)

    def result(self) -> ChildResult:
        """Return the result of the child. The bus thread must not use the stream afterwards."""
        return ChildResult(self.stream.child, self.stream, tuple(self.workers))
