"""What is done for HTTP clients: no more at a time than allowed, nothing for one that has left, and piece by piece."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.http.edge import SEND_BYTES
from frontend.http.errors import HttpError, error_body, http_error
from schemas.errors import RollbusError

__all__ = ["Admission", "EventStream", "JsonPieces", "until_disconnect"]

T = TypeVar("T")

END = b"data: [DONE]\n\n"
"""The last event of a stream that has not failed, as OpenAI's clients expect it."""


class Admission:
    """Counts the requests for tokens that are under way, and bounds them.

    Attributes:
        in_flight: how many there are.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.in_flight = 0

    @contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """Count so many more while the block lasts.

        Raises:
            HttpError: 429, with them there were more than may be.
        """
        if self.in_flight + count > self._max_in_flight:
            more = f", and this is {count} more" if count > 1 else ""
            problem = f"{self.in_flight} requests are under way{more}; allowed: {self._max_in_flight}"
            raise HttpError(429, problem, code="busy")
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Do `work`; a client that leaves meanwhile cancels it. The body must have been read.

    Raises:
        ClientDisconnect: it left. And what `work` raises.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_disconnected(receive))
            result = await work
            watching.cancel()
            return result
    except BaseExceptionGroup as group:
        # One of the two: whichever came first has cancelled the other.
        raise group.exceptions[0] from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class JsonPieces(Response):
    """A JSON answer that is made while it is sent, no faster than the client reads it.

    Args:
        pieces: of the document; making them must not fail, as the status has been sent by then.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gathered = bytearray()
        for piece in self._pieces:
            gathered += piece
            # Small pieces are put together: each send is a system call.
            if len(gathered) >= SEND_BYTES:
                await send({"type": "http.response.body", "body": bytes(gathered), "more_body": True})
                gathered.clear()
                # Others' turn, also when this client reads as fast as it is sent to.
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": bytes(gathered)})


class EventStream(Response):
    """Server-sent events; a client that leaves ends them, and with them what makes them.

    Args:
        first: the first event, which has come already: whatever fails before it still has a status of its own.
        events: the others, as JSON; an error among them is an event, and the last one.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        async with aclosing(self._events):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_body(b"data: %b\n\n" % self._first))
        try:
            async for event in self._events:
                await send(_body(b"data: %b\n\n" % event))
        except (HttpError, RollbusError) as error:
            failure = error if isinstance(error, HttpError) else http_error(error)
            await send(_body(b"data: %b\n\n" % error_body(failure), more=False))
        else:
            await send(_body(END, more=False))


def _body(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}
