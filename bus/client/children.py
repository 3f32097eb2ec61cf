"""The bus thread's end of a request: its call, and what becomes of each sample.

A request of n samples is n requests to the fleet, its children; they end together when one of them fails.
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
        call: the caller's end.
        serial: no other call of this client has it.
        attempt: number of the first attempt: above 0 when what is left of an earlier call of the same id may turn up.
    """

    def __init__(self, call: Call, *, serial: int, attempt: int) -> None:
        self.call = call
        self.serial = serial
        self.request_id = call.request.request_id
        self.model = call.model
        self.first_attempt = attempt
        self.children = [
            ChildRequest(self, ResponseStream(request, child=index, attempt=attempt, keep=not call.streams), payload)
            for index, (request, payload) in enumerate(zip(call.children, call.payloads, strict=True))
        ]
        self.target_version: int | None = None
        """Of the weights that the model's workers were to have when it was submitted; None until that is known, and
        where nobody asks."""
        self.pieces: tuple[PrefixScope, tuple[int, ...]] | None = None
        """Hashes of the prompt, and what they are for; None until they are made."""
        self.has_ended = False
        """All children have their terminal chunk, or the call has failed as a whole."""
        self.is_stopping = False
        """Its children end with what they have: none of them is published again."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call at its deadline."""

    @property
    def next_attempt(self) -> int:
        """A number that no attempt of any child has."""
        return max(child.stream.attempt for child in self.children) + 1

    def finish(self, error: RequestError | None = None) -> None:
        """Tell the caller that it is over; without effect the second time."""
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
        """Let go of the children, which have all ended.

        They name this call, and so would keep the result that it holds, however large, until the garbage collector
        looks at everything there is.
        """
        self.children.clear()

    def failure(self, code: ErrorCode, message: str) -> RequestFailed:
        """An error of this call."""
        return RequestFailed(code=code, message=message, request_id=self.request_id)


class ChildRequest(AttemptMachine):
    """A child request with the call that it belongs to."""

    def __init__(self, open_call: OpenCall, stream: ResponseStream, payload: bytes) -> None:
        super().__init__(stream, payload, now=time.monotonic(), deadline=open_call.call.deadline_s)
        self.open_call = open_call
        self.timer: asyncio.TimerHandle | None = None
        """Ends the present state, if that has a time limit."""
        self.may_wait = False
        """The current attempt may wait at its worker for a slot, and that has not named it a second time."""

    @property
    def has_begun(self) -> bool:
        """True if the engine of its worker may have seen it."""
        return not self.may_wait or self.has_token

    def stop_timer(self) -> None:
        """Cancel the timer of a state that was left."""
        if self.timer is not None and self.state not in TIMED:
            self.timer.cancel()
            self.timer = None

    @property
    def token(self) -> str:
        """Names this child request among all of the client, in whichever call."""
        return f"{self.open_call.serial}.{self.stream.child}"

    @property
    def msg_id(self) -> str:
        """Names the current attempt among all of the client."""
        return f"{self.open_call.serial}.{self.stream.attempt}.{self.stream.child}"

    def payload(self) -> bytes:
        """The request of the current attempt, encoded; a resumed one has its place in the trace."""
        spans = self.open_call.call.spans
        if self._payload is None and spans is not None and (context := spans.context_of(self.stream.child)):
            self._request = self._request.in_trace(context.traceparent, context.tracestate)
        return super().payload()

    def note(self, instructions: Sequence[Instruction]) -> None:
        """Note for the call's spans, if it is traced, what has just happened."""
        spans = self.open_call.call.spans
        if spans is not None:
            for instruction in instructions:
                spans.note(self, instruction)

    def result(self) -> ChildResult:
        """What came of it; the bus thread must not touch the stream any more."""
        return ChildResult(self.stream.child, self.stream, tuple(self.workers))
