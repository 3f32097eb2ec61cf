"""What is done for HTTP clients: no more at a time than allowed, nothing for one that has left, and piece by piece."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...schemas.errors import RollbusError
from .edge import SEND_BYTES
from .errors import HttpError, error_body, http_error

__all__ = ["Admission", "EventStream", "JsonPieces", "first_error", "until_disconnect"]

T = TypeVar("T")

END = b"data: [DONE]\n\n"
"""The last event of a stream that has not failed, as OpenAI's clients expect it."""


class Admission:
    """Counts the requests for tokens that are under way, and bounds them.

    Each user may have an equal part of them, however many the other users have.

    Attributes:
        in_flight: how many there are.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._by_user: dict[str, int] = {}
        self.in_flight = 0

    @contextmanager
    def admitted(self, count: int = 1, user: str = "") -> Iterator[None]:
        """Count so many more while the block lasts.

        Raises:
            HttpError: 429, with them there were more than may be.
        """
        own = self._by_user.get(user, 0)
        share = max(self._max_in_flight // len({user, *self._by_user}), 1)
        if self.in_flight + count > self._max_in_flight and own + count > share:
            more = f", and this is {count} more" if count > 1 else ""
            problem = f"{self.in_flight} requests are under way, {own} of them this user's{more}"
            raise HttpError(429, f"{problem}; allowed: {self._max_in_flight}, {share} of each user", code="busy")
        self._by_user[user] = own + count
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count
            self._by_user[user] -= count
            if not self._by_user[user]:
                del self._by_user[user]


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first error of several tasks that failed: the others were cancelled because of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Do `work`; a client that leaves meanwhile cancels it. The body must have been read.

    Raises:
        ClientDisconnect: it left. And what `work` raises.
    """
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_disconnected(receive))
            result = await work
            watching.cancel()
    return result


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
