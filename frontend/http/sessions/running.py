"""A running turn: its answer is written once, and read by the client and by retries of the same turn.

The turn does not depend on the connection of its client. If nobody reads it, it goes on for some seconds, so that a
retry can attach.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .... import bus
from ..answers import AnswerChoice, Update, updates
from ..calls import first_error
from ..edge import ResponseSender, while_connected
from ..errors import HttpError
from ..service import Service
from ..tokens import Scores, Tokens
from ..writer import KEEP_ALIVE_S
from .store import Claim

ATTACH_S: Final = 10.0
"""Seconds for which a turn goes on without a reader. The clients of OpenAI retry within eight seconds."""


@dataclass(eq=False)
class _Nobody:
    """Stands for the connection of a turn, which outlives that of its client."""

    is_lost: bool = False
    waiting: list[asyncio.Task[Any]] = field(default_factory=list)


def detached(request: Request, until_closed: ExitStack) -> Request:
    """Return a request with the headers and the user of `request` that does not depend on its connection.

    Args:
        until_closed: ends what the request holds, when its turn is closed.
    """
    state = {**request.scope["state"], "connection": _Nobody(), "until_answered": until_closed}
    return Request({**request.scope, "state": state})


class RunningTurn:
    """One turn while its answer is written.

    Attributes:
        retry_key: digest of the key that the client chose, to recognize a retry; empty: none.
        body_digest: digest of the API and the body.
        written: the pieces of the answer so far.
        has_ended: True if the answer is complete, or has failed.
        claim: this service's claim of the turn with its sequence number; None: it has none.
        is_lost: True if another service has the claim now, so that this turn does not count.
    """

    def __init__(self, retry_key: str, body_digest: str, *, is_stream: bool) -> None:
        self.retry_key = retry_key
        self.body_digest = body_digest
        self.is_stream = is_stream
        self.has_ended = False
        self.claim: tuple[Claim, int] | None = None
        self.is_lost = False
        self.headers: dict[str, str] = {}
        self.written: list[bytes] = []
        self._error: HttpError | None = None
        self._changed = asyncio.Event()
        self._readers = 0
        self._is_stopped = False
        self._stop_reason = bus.FinishReason.ABORT
        self._scope: asyncio.Timeout | None = None
        self._watch: asyncio.TimerHandle | None = None

    def write(self, piece: bytes) -> None:
        """Add a piece of the answer."""
        self.written.append(piece)
        self._wake()

    def end(self, error: HttpError | None = None) -> None:
        """End the answer. An error before the first piece has a status of its own."""
        self._error, self.has_ended = error, True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self, reason: bus.FinishReason = bus.FinishReason.ABORT) -> None:
        """End the generation. The answer ends with the tokens so far."""
        if not self._is_stopped:
            self._is_stopped, self._stop_reason = True, reason
            if self._scope is not None:
                self._scope.reschedule(0.0)

    def abandon(self) -> None:
        """End the generation, because another service runs the turn. The tokens so far are no complete turn."""
        self.is_lost = True
        self.stop()

    @property
    def was_aborted(self) -> bool:
        """True if the generation was stopped before its end, except at a limit, or another service has the turn."""
        return self.is_lost or (self._is_stopped and self._stop_reason is bus.FinishReason.ABORT)

    async def source(
        self,
        service: Service,
        http_request: Request,
        requests: Sequence[bus.GenerateRequest],
        choices: Sequence[AnswerChoice],
    ) -> AsyncGenerator[Iterator[tuple[AnswerChoice, Update]], None]:
        """Yield updates until the answers end or `stop` ends them. An ended answer has a last update in any case."""
        source = updates if requests[0].sampling.is_continuable else self._at_once
        async with aclosing(source(service, http_request, requests, choices)) as found:
            while not self._is_stopped:
                try:
                    async with asyncio.timeout(None) as self._scope:
                        added = await anext(found, None)
                except TimeoutError:
                    # Only `stop` sets a time.
                    break
                finally:
                    self._scope = None
                if added is None:
                    break
                yield added
        ended = [choice for choice in choices if choice.finish_reason is None]
        yield iter([(choice, choice.add(_nothing(choice, self._stop_reason))) for choice in ended])

    async def _at_once(
        self,
        service: Service,
        http_request: Request,
        requests: Sequence[bus.GenerateRequest],
        choices: Sequence[AnswerChoice],
    ) -> AsyncGenerator[Iterator[tuple[AnswerChoice, Update]], None]:
        """Yield one update for each answer, when all have ended or `stop` has ended them.

        No other worker can continue an answer of a sampler with a state, for example a grammar. While the client has no
        token of it, it starts over. Until then, yield nothing from time to time, so that a stream shows that it lives.

        Raises:
            RequestError: the request failed, after its tokens were yielded.
        """
        (request,) = requests
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(service.complete(http_request, request, raises=False))
                try:
                    while not (await asyncio.wait([running], timeout=KEEP_ALIVE_S))[0]:
                        yield iter(())
                except asyncio.CancelledError:
                    if not self._is_stopped:
                        raise
                    if not await service.rb.abort([request.request_id]):
                        # It waits for its turn.
                        running.cancel()
        if running.cancelled():
            return
        result = running.result()
        found = []
        for choice, generation in zip(choices, (result, *result.siblings), strict=True):
            tokens = Tokens.of_generation(generation, choice.request)
            if result.error is not None:
                tokens = replace(tokens, finish_reason=None)
            elif self._is_stopped and tokens.finish_reason == bus.FinishReason.ABORT:
                tokens = replace(tokens, finish_reason=self._stop_reason)
            found.append((choice, choice.add(tokens)))
        yield iter(found)
        if result.error is not None:
            raise result.error

    async def response(self, request: Request) -> "Response":
        """Return the answer for one reader, after its first piece.

        Raises:
            HttpError: the turn failed before its first piece.
            ClientDisconnect: the reader disconnected.
        """
        self.attach()
        try:
            with while_connected(request.scope):
                while not self.written and not self.has_ended:
                    await self._changed.wait()
            if self._error is not None and not self.written:
                raise self._error
        except BaseException:
            self.detach()
            raise
        return _Reading(self)

    def attach(self) -> None:
        """Count one more reader."""
        self._readers += 1
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def detach(self) -> None:
        """Count one reader less. Without any, the turn ends after some seconds."""
        self._readers -= 1
        if not self._readers and not self.has_ended:
            self._watch = asyncio.get_running_loop().call_later(ATTACH_S, self.stop)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield all pieces, those that are there and those that come."""
        at = 0
        while True:
            while at < len(self.written):
                yield self.written[at]
                at += 1
            if self.has_ended:
                return
            await self._changed.wait()


class _Reading(Response):
    """The answer of a turn for one reader."""

    def __init__(self, turn: RunningTurn) -> None:
        kind = "text/event-stream" if turn.is_stream else "application/json"
        super().__init__(headers={"Cache-Control": "no-store", **turn.headers}, media_type=kind)
        del self.headers["content-length"]
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces.

        Raises:
            ClientDisconnect: the reader disconnected.
        """
        delivery: ResponseSender = scope["state"]["delivery"]
        try:
            with while_connected(scope):
                delivery.begin(self.status_code, self.raw_headers)
                async with aclosing(self._turn.pieces()) as pieces:
                    async for piece in pieces:
                        await delivery.write(piece)
                await delivery.write(b"", is_last=True)
        finally:
            self._turn.detach()


def _nothing(choice: AnswerChoice, reason: bus.FinishReason) -> Tokens:
    """Return no tokens, with the reason for which an answer ends."""
    logprobs = None if choice.request.sampling.logprobs is None else np.empty(0, "<f4")
    return Tokens(scores=Scores(np.empty(0, "<i4"), logprobs), weight_versions=np.empty(0, "<i4"), finish_reason=reason)
