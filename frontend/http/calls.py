"""Execution of HTTP requests: a limit on open requests, cancellation after a disconnect, and answers in pieces."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import compress, repeat
from types import GeneratorType
from typing import Any, Final, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ... import bus
from ...schemas.decoding import JsonObject
from ...schemas.errors import RollbusError
from .edge import SEND_BYTES, ResponseSender, while_connected
from .errors import HttpError, error_body, http_error

PING: Final = b": ping\n\n"
"""A comment instead of an event. It keeps proxies and clients from closing a stream whose text is held back."""
END = b"data: [DONE]\n\n"
"""The last event of a successful stream, as OpenAI's clients expect it."""


class Admission:
    """Counts and limits the open token requests.

    Each user may have an equal share of the limit, independent of the load by other users.

    Attributes:
        in_flight: number of open requests.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._by_user: dict[str, int] = {}
        self.in_flight = 0

    def add(self, count: int, user: str) -> None:
        """Count `count` more requests until `remove`.

        Raises:
            HttpError: 429, the new requests would exceed the limit.
        """
        own = self._by_user.get(user, 0)
        if self.in_flight + count > self._max_in_flight:
            share = max(self._max_in_flight // len({user, *self._by_user}), 1)
            if own + count > share:
                more = f", and this request needs {count} more" if count > 1 else ""
                problem = f"{self.in_flight} requests are open, {own} of them from this user{more}"
                raise HttpError(429, f"{problem}; allowed: {self._max_in_flight}, {share} for each user", code="busy")
        self._by_user[user] = own + count
        self.in_flight += count

    def remove(self, count: int, user: str) -> None:
        """Count these requests no more."""
        self.in_flight -= count
        self._by_user[user] -= count
        if not self._by_user[user]:
            del self._by_user[user]


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first error of several failed tasks. The task group cancelled the other tasks because of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class _Unsized(Response):
    """An answer whose size is not known when it begins. Starlette's constructor takes five times as long."""

    content_type = b""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        given = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.raw_headers = [*given, (b"content-type", self.content_type)]


class JsonPieces(_Unsized):
    """A JSON answer that is created while it is sent, at the speed at which the client reads.

    Args:
        pieces: of the document. The iterator must not fail, because the status is already sent.
    """

    content_type = b"application/json"

    def __init__(self, pieces: Iterable[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces.

        Raises:
            ClientDisconnect: the client disconnected.
        """
        delivery: ResponseSender = scope["state"]["delivery"]
        with while_connected(scope):
            delivery.begin(self.status_code, self.raw_headers)
            gathered = bytearray()
            for piece in self._pieces:
                gathered += piece
                # Small pieces are joined, because each send is a system call.
                if len(gathered) >= SEND_BYTES:
                    await delivery.write(bytes(gathered))
                    gathered.clear()
                    # Let other tasks run, even if this client reads as fast as the service sends.
                    await asyncio.sleep(0)
            await delivery.write(bytes(gathered), is_last=True)


def in_pieces(fields: Mapping[str, Any]) -> dict[str, Iterator[bytes]]:
    """Return the fields whose values are JSON in pieces."""
    return dict(compress(fields.items(), map(isinstance, fields.values(), repeat(GeneratorType))))


def object_json(fields: JsonObject) -> Iterator[bytes]:
    """Yield a JSON object: first its values, and then those that are JSON in pieces."""
    pieces = in_pieces(fields)
    if not pieces:
        yield msgspec.json.encode(fields)
        return
    before = msgspec.json.encode({name: fields[name] for name in fields if name not in pieces})[:-1]
    before += b"," if len(pieces) < len(fields) else b""
    for name, value in pieces.items():
        yield b'%b"%b":' % (before, name.encode())
        yield from value
        before = b","
    yield b"}"


def objects_json(objects: Iterable[JsonObject]) -> Iterator[bytes]:
    """Yield a JSON array of objects, each as `object_json` does."""
    before = b"["
    for each in objects:
        yield before
        yield from object_json(each)
        before = b","
    yield b"]"


class StreamEnd:
    """How a stream ends: as those of OpenAI's chat API. Other APIs override it."""

    done: bytes = END
    """What follows the events."""

    def fail(self, error: HttpError) -> bytes:
        """Return the last event of a stream with an error."""
        return encode_event(error_body(error))


class EventStream(_Unsized):
    """Server-sent events. If the client disconnects, the stream ends and its source is closed.

    Args:
        first: the first events, already received. An error before them still has an HTTP status of its own.
        events: the other events as they are sent, several at a time or `PING`. An error among them becomes the last
            event.
        ending: what follows the events.
    """

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str], ending: StreamEnd
    ) -> None:
        super().__init__({"Cache-Control": "no-store", **headers})
        self._first = first
        self._events = events
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        delivery: ResponseSender = scope["state"]["delivery"]
        async with aclosing(self._events):
            with while_connected(scope):
                delivery.begin(self.status_code, self.raw_headers)
                await delivery.write(self._first)
                self._first, last = b"", self._ending.done
                try:
                    async for events in self._events:
                        await delivery.write(events)
                except (HttpError, RollbusError) as error:
                    last = self._ending.fail(error if isinstance(error, HttpError) else http_error(error))
                await delivery.write(last, is_last=True)


def encode_event(document: bytes) -> bytes:
    """Return one event of a stream.

    Args:
        document: its JSON.
    """
    return b"data: %b\n\n" % document


ChunksAt: TypeAlias = tuple[int, list[bus.Chunk]]
"""Chunks, and the index of their request."""
_Waiting: TypeAlias = asyncio.Queue[ChunksAt | Exception | None]

MAX_WAITING: Final = 16
"""Limit on received lists of chunks that the caller has not read. Further chunks wait in their sources."""


async def merged(sources: Sequence[AsyncGenerator[ChunksAt, None]]) -> AsyncGenerator[ChunksAt, None]:
    """Yield what all sources yield. Closing the generator closes them. An error of one source closes the others too."""
    waiting: _Waiting = asyncio.Queue(MAX_WAITING)
    open_sources = len(sources)
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            for source in sources:
                tasks.create_task(_pump(source, waiting))
            while open_sources:
                item = await waiting.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_sources -= 1
                else:
                    yield item


async def _pump(source: AsyncGenerator[ChunksAt, None], waiting: _Waiting) -> None:
    end: Exception | None = None
    async with aclosing(source) as found:
        try:
            async for chunks in found:
                await waiting.put(chunks)
        except (HttpError, RollbusError) as error:
            # The error is not raised here: it would cancel the reading task at an arbitrary point.
            end = error
    await waiting.put(end)


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
