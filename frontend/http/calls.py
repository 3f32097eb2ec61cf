"""Execution of HTTP requests: a limit on open requests, the users' turns, and answers in pieces.

Users share the fleet's capacity equally. Workers pull requests from the queue in the order of their arrival. So this
service puts only a few more requests into the queue than the workers can run, and the others wait here for their
users' turns. Otherwise a flood from one user would delay all later requests of other users.
"""

import asyncio
import bisect
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ... import bus
from ...schemas.decoding import JsonObject
from ...schemas.errors import RequestTimeout, RollbusError
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.presence import WorkerPresence
from .edge import SEND_BYTES, ResponseSender, while_connected
from .errors import HttpError, error_body, http_error
from .metrics import Metrics

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


MIN_AHEAD: Final = 8
"""Minimum number of samples in the fleet's queue, so that a worker with a free slot need not wait for this service."""
MIN_LEFT_S: Final = 0.001
"""Least rest of a timeout in seconds: a request's timeout is above 0."""


def room_of(workers: Sequence[WorkerPresence], model: str) -> int | None:
    """Return the limit on open samples of a model in the fleet; None if no worker announces its number of slots."""
    slots = sum(
        worker.capabilities.max_num_seqs
        for worker in workers
        if worker.model == model
        and worker.state.is_present
        and worker.capabilities is not None
        and worker.capabilities.role != "prefill"
    )
    return slots + max(slots // 4, MIN_AHEAD) if slots else None


T = TypeVar("T")


Workers = Callable[[], Sequence[WorkerPresence]]
"""Returns the current workers, the same object until they change."""


def of_fleet(workers: Workers, find: Callable[[Sequence[WorkerPresence], str], T | None]) -> Callable[[str], T | None]:
    """Return what follows from the current workers for a model, found again only when they have changed.

    Args:
        find: finds it. None is not kept, because clients choose the names of models.
    """
    seen: Sequence[WorkerPresence] = ()
    found: dict[str, T] = {}

    def current(model: str) -> T | None:
        nonlocal seen, found
        if (now := workers()) is not seen:
            seen, found = now, {}
        if model not in found and (new := find(now, model)) is not None:
            found[model] = new
        return found.get(model)

    return current


@dataclass(slots=True, eq=False)
class FleetTurn:
    """The turn of one request: a block that begins when the request may go to the fleet, and ends the turn at last."""

    turns: "Turns"
    user: str
    request: bus.GenerateRequest
    """The request. Within the block, it has the rest of its timeout."""
    http_request: Any
    serial: int
    """Position in the order of arrival."""
    model: str
    arrived_at: float = field(default_factory=time.monotonic)
    """Time at which the request began to wait for its turn, on `time.monotonic()`."""
    due: asyncio.Future[None] | None = None
    """Done as soon as the request may go to the fleet. None: it has not waited."""
    is_open: bool = False
    """True: the request counts as open."""
    has_ended: bool = False

    async def __aenter__(self) -> Self:
        """Wait for the turn.

        Raises:
            RequestTimeout: the request's turn did not come within its timeout.
        """
        self.turns.entered[self] = None
        try:
            await self.turns.wait_for(self)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End the turn."""
        self.end()
        del self.turns.entered[self]

    def end(self) -> None:
        """End the turn: the request has ended in the fleet. Repeated calls are safe."""
        if not self.has_ended:
            self.has_ended = True
            self.turns.remove(self)


class Turns:
    """The waiting requests of all models. Next is one of the user with the fewest open samples, its most urgent one.

    Users with equal numbers take turns.

    Args:
        default_room: limit on open samples of a model if no worker announces its number of slots.
    """

    def __init__(self, workers: Workers, default_room: int, metrics: Metrics) -> None:
        self._room_of = of_fleet(workers, room_of)
        self._default_room = default_room
        self._metrics = metrics
        self._serials = itertools.count()
        # By model: the waiting requests of all users, the most urgent first, in the order of the users' turns.
        self._waiting: dict[str, dict[str, list[FleetTurn]]] = {}
        # Open samples by model and user.
        self._open: dict[str, dict[str, int]] = {}
        self.entered: dict[FleetTurn, None] = {}
        """The turns whose blocks run or wait. Two clients may choose one id, so they are known by identity."""

    def turn(self, user: str, request: bus.GenerateRequest, http_request: object = None) -> FleetTurn:
        """Return the turn of a request, which an `async with` block waits for."""
        return FleetTurn(self, user, request, http_request, next(self._serials), request.model or "")

    async def wait_for(self, turn: FleetTurn) -> None:
        """Wait for a turn, as entering it does."""
        if turn.model not in self._waiting and self._has_room(turn.model):
            self._open_up(turn)
            return
        turn.due = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(turn.model, {}).setdefault(turn.user, [])
        bisect.insort(turns, turn, key=lambda one: (one.request.priority, one.serial))
        self._call_up(turn.model)
        if not turn.is_open:
            turn.request = await self._wait(turn, turn.due)

    async def _wait(self, turn: FleetTurn, due: asyncio.Future[None]) -> bus.GenerateRequest:
        begun, request = time.monotonic(), turn.request
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        self._metrics.waiting[turn.model,] += 1
        try:
            await asyncio.wait([due], timeout=timeout_s)
        finally:
            self._metrics.waiting[turn.model,] -= 1
        if not turn.is_open:
            message = f"not finished within {timeout_s:g} s: the request waited behind other requests of this service"
            raise RequestTimeout(stage="admission", message=message, request_id=request.request_id)
        return replace(request, timeout_s=max(timeout_s - (time.monotonic() - begun), MIN_LEFT_S))

    def end_wait(self, turn: FleetTurn) -> None:
        """Let a request that is aborted go to the client of the bus before its turn, because only that aborts it."""
        if not turn.is_open:
            self._begin(turn)

    def _has_room(self, model: str) -> bool:
        # The last request may exceed the room.
        return sum(self._open.get(model, {}).values()) < (self._room_of(model) or self._default_room)

    def _call_up(self, model: str) -> None:
        while (users := self._waiting.get(model)) and self._has_room(model):
            running = self._open.get(model, {})
            self._begin(users[min(users, key=lambda user: running.get(user, 0))][0])

    def _begin(self, turn: FleetTurn) -> None:
        """Open up a waiting request."""
        self._leave(turn)
        self._open_up(turn)
        users = self._waiting.get(turn.model, {})
        if turn.user in users:
            users[turn.user] = users.pop(turn.user)

    def _open_up(self, turn: FleetTurn) -> None:
        running = self._open.setdefault(turn.model, {})
        running[turn.user] = running.get(turn.user, 0) + turn.request.sampling.n
        turn.is_open = True
        if turn.due is not None:
            turn.due.set_result(None)

    def _leave(self, turn: FleetTurn) -> None:
        """Remove a waiting request."""
        users = self._waiting[turn.model]
        users[turn.user].remove(turn)
        if not users[turn.user]:
            del users[turn.user]
        if not users:
            del self._waiting[turn.model]

    def remove(self, turn: FleetTurn) -> None:
        """Remove a request that has ended, or that waits no more."""
        model = turn.model
        if turn.is_open:
            running = self._open[model]
            running[turn.user] -= turn.request.sampling.n
            if not running[turn.user]:
                del running[turn.user]
            if not running:
                del self._open[model]
        else:
            self._leave(turn)
        self._call_up(model)


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
    return {name: value for name, value in fields.items() if hasattr(value, "__next__")}


def object_json(fields: JsonObject) -> Iterator[bytes]:
    """Yield a JSON object: first its values, and then those that are JSON in pieces."""
    pieces = in_pieces(fields)
    data = msgspec.json.encode({name: fields[name] for name in fields if name not in pieces} if pieces else fields)
    before = data[:-1] + (b"," if len(pieces) < len(fields) else b"") if pieces else data
    for name, value in pieces.items():
        yield b'%b"%b":' % (before, name.encode())
        yield from value
        before = b","
    yield b"}" if pieces else before


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
