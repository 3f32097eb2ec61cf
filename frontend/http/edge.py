"""The outermost layer of the service: limits and deadlines of connections, and a request id for every answer.

uvicorn has a deadline for idle connections only. `HttpConnection` adds a deadline and a size limit for request heads,
`ResponseSender` a deadline for clients that read slowly. `ConnectionTable` selects the connection to close when the
limit is reached.
"""

import asyncio
import enum
import os
import resource
import socket
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.request import check_given_id
from .errors import HttpError, error_body, error_response

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol


C = TypeVar("C")

HEAD_TIMEOUT_S: Final = 30.0
"""Seconds from the opening of a connection, or from the first byte of a later request, until the request head is
complete.
"""
KEEP_ALIVE_S: Final = 75
"""Seconds, longer than clients keep idle connections. Otherwise a client could send while the service closes."""
LINGER_S: Final = 5.0
"""Seconds for a client to read the reason before its connection closes."""
MAX_HEAD_BYTES: Final = 64 << 10
"""Limit for a request head. h11, which uvicorn uses without httptools, has a smaller limit of its own."""
MIN_CONNECTIONS: Final = 8
MAX_CONNECTIONS: Final = 4096
"""Default limit, unless `max_in_flight` is larger."""
SPARE_DESCRIPTORS: Final = 32
"""File descriptors for other uses than HTTP: NATS, files, and loading a tokenizer."""
WANTED_DESCRIPTORS: Final = 16_384


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of file descriptors to the hard limit. Each connection needs one descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections(max_in_flight: int) -> int:
    """Return the connection limit: all requests in flight plus other connections, within the descriptor limit."""
    wanted = max(MAX_CONNECTIONS, 2 * max_in_flight)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough
    return max(min(wanted, free - SPARE_DESCRIPTORS), MIN_CONNECTIONS)


class Stage(enum.Enum):
    """The event that a connection waits for."""

    HEAD = enum.auto()
    """The client has not sent a complete request head."""
    IDLE = enum.auto()
    """The last request is answered, and no byte of the next request has arrived."""
    WATCHING = enum.auto()
    """The client watches the fleet through an endless event stream."""
    BODY = enum.auto()
    """The service answers a request whose body is not complete."""
    ANSWER = enum.auto()
    """The service answers a complete request."""


EXPENDABLE: Final = (Stage.HEAD, Stage.IDLE, Stage.WATCHING, Stage.BODY)
"""Stages that may be closed if there are too many connections, in this order. None has a complete request that awaits
its answer.
"""
WATCHING_BUFFER_BYTES: Final = 64 << 10
"""Send buffer of the system for a watching client. Data in this buffer is older than the next event, so it is kept
small.
"""
WATCHING_TIMEOUT_S: Final = 60
"""Seconds for a watching client to confirm received data. A machine that was switched off never confirms it."""


class ConnectionTable(Generic[C]):
    """The open connections by stage, in the order in which they reached the stage.

    Args:
        limit: largest number of connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_stage: dict[Stage, dict[C, None]] = {stage: {} for stage in Stage}
        self._stages: dict[C, Stage] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._stages)

    def move(self, connection: C, stage: Stage) -> None:
        """Record that a new or known connection has reached a stage."""
        self.remove(connection)
        self._stages[connection] = stage
        self._by_stage[stage][connection] = None

    def remove(self, connection: C) -> None:
        """Remove a connection. Repeated calls are safe."""
        stage = self._stages.pop(connection, None)
        if stage is not None:
            del self._by_stage[stage][connection]

    def stage(self, connection: C) -> Stage | None:
        """Return the stage of a connection; None if the connection is not open."""
        return self._stages.get(connection)

    @property
    def is_full(self) -> bool:
        """True if a connection must be closed before the service accepts another."""
        return len(self._stages) >= self.limit

    @property
    def has_too_many_requests(self) -> bool:
        """True if requests use more than seven eighths of the limit.

        The rest is reserved for new connections and health checks.
        """
        return len(self._by_stage[Stage.BODY]) + len(self._by_stage[Stage.ANSWER]) > self.limit - self.limit // 8

    def victim(self, *stages: Stage) -> C | None:
        """Return the oldest connection of the first of these stages that has any; None if all stages are empty."""
        return next((connection for stage in stages for connection in self._by_stage[stage]), None)


class OpenConnections:
    """Closes connections that are too slow or exceed the limit.

    Args:
        limit: largest number of connections.
        client_timeout_s: from the service's settings. Request heads have the same time, but at most `HEAD_TIMEOUT_S`.
        on_cut: called with the reason each time a connection is closed.
    """

    def __init__(self, limit: int, client_timeout_s: float, on_cut: Callable[[str], None]) -> None:
        self.table: ConnectionTable[HttpConnection] = ConnectionTable(limit)
        self.head_timeout_s = min(client_timeout_s, HEAD_TIMEOUT_S)
        self.on_cut = on_cut

    def make_room(self) -> None:
        """Close the oldest expendable connection if the next connection would exceed the limit."""
        if self.table.is_full:
            self.cut_oldest(*EXPENDABLE)

    def cut_oldest(self, *stages: Stage) -> bool:
        """Close the oldest connection of the first of these stages that has any.

        Return False if all stages are empty.
        """
        victim = self.table.victim(*stages)
        if victim is None:
            return False
        self.on_cut("too_many")
        victim.cut()
        return True

    def has_room_for(self, connection: "HttpConnection") -> bool:
        """Return True if the service may answer a new request. A slower request is closed to make room for it."""
        while self.table.has_too_many_requests:
            if self.table.victim(Stage.BODY) in (None, connection):
                return False
            self.cut_oldest(Stage.BODY)
        return True


def unframed(send: Send) -> Send:
    """Return a `send` that ends the body of an answer without a length by closing the connection.

    HTTP/1.0 has no chunks, but uvicorn's httptools implementation would send them. h11 does the right thing itself.

    Args:
        send: uvicorn's own `send` of one answer, before the answer has begun.
    """
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "chunked_encoding"):
        return send
    cycle.chunked_encoding = False

    async def send_next(message: Message) -> None:
        # uvicorn counts the body's bytes against this number.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_next


class HttpConnection(HttpProtocol):
    """uvicorn's connection, which reports its stage to `OpenConnections`.

    It uses these parts of uvicorn: the constructor, the methods of `asyncio.Protocol`, `send_400_response`, the
    callbacks of httptools, `parser` and `cycle` with its `more_body`. `unframed` uses two more fields of the cycle.
    pyproject.toml lists the releases in which these are the same.
    """

    def __init__(
        self, connections: OpenConnections, config: Config, server_state: ServerState, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(config, server_state, {"connection": self}, loop)
        self._connections = connections
        self._num_requests = 0
        # Counts the body bytes of the latest request, and the bytes outside bodies since then.
        self._num_body_bytes = 0
        self._num_other_bytes = 0
        self._is_in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Wait for the first request head."""
        super().connection_made(transport)
        self._connections.table.move(self, Stage.HEAD)
        self._move(Stage.HEAD)

    def data_received(self, data: bytes) -> None:
        """Record the progress of the request."""
        cycle, num_body_bytes = self.cycle, self._num_body_bytes
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not cycle:
            self._num_other_bytes = self._num_body_bytes = 0
            self._move_to_request()
            return
        if self._stage is Stage.IDLE:
            self._move(Stage.HEAD)
        elif self._stage is Stage.BODY and not self.cycle.more_body:
            self._move(Stage.ANSWER)
        self._num_other_bytes += len(data) - (self._num_body_bytes - num_body_bytes)
        # h11 has a limit of its own. httptools buffers a head, and the bytes between and after the chunks of a body.
        if hasattr(self, "parser") and self._num_other_bytes > MAX_HEAD_BYTES + self._num_body_bytes:
            message = f"the request's head or trailers are too large; allowed: {MAX_HEAD_BYTES} bytes"
            self._refuse(HttpError(431, message, code="head_too_large"))

    def on_message_begin(self) -> None:
        """Begin the head of a request. httptools calls this."""
        self._is_in_head = True
        super().on_message_begin()  # type: ignore[misc]  # h11's has no such method, and does not call it

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the head. httptools also calls this for trailers, which must not count as headers."""
        if self._is_in_head:
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """End the head of a request. httptools calls this."""
        self._is_in_head = False
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body part. httptools calls this."""
        self._num_body_bytes += len(body)
        super().on_body(body)  # type: ignore[misc]  # h11's has no such method, and does not call it

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table."""
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in the common error format."""
        self._refuse(HttpError(400, msg.rstrip("."), code="invalid_http"))

    def begin_request(self) -> None:
        """Record that uvicorn has called the application."""
        self._num_requests += 1
        self._move_to_request()

    def begin_watching(self) -> None:
        """Record that the answer is an endless stream whose old events have no value."""
        self._move(Stage.WATCHING)
        socket_: socket.socket = self.transport.get_extra_info("socket")
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WATCHING_BUFFER_BYTES)
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, WATCHING_TIMEOUT_S * 1000)

    def end_request(self) -> None:
        """Record that the application has returned. With pipelining, another request may have begun."""
        self._num_requests -= 1
        if not self._num_requests:
            self._move(Stage.IDLE)

    def cut(self) -> None:
        """Close the connection immediately and discard unsent data."""
        self._forget()
        # `close()` would wait for the client to read.
        self.transport.abort()

    @property
    def _stage(self) -> Stage | None:
        return self._connections.table.stage(self)

    def _move_to_request(self) -> None:
        self._move(Stage.BODY if self.cycle.more_body else Stage.ANSWER)

    def _move(self, stage: Stage) -> None:
        if self._stage is None:
            # The connection was closed meanwhile.
            return
        self._connections.table.move(self, stage)
        if stage is Stage.HEAD:
            self._set_deadline(self._connections.head_timeout_s, self._end_wait_for_head)
        elif stage is Stage.IDLE:
            # uvicorn closes the connection at this time but waits for a client that does not read the last bytes.
            self._set_deadline(KEEP_ALIVE_S + LINGER_S, self.cut)
        else:
            self._set_deadline(None, self.cut)

    def _set_deadline(self, seconds: float | None, then: Callable[[], None]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, then)

    def _end_wait_for_head(self) -> None:
        self._connections.on_cut("head_timeout")
        message = f"the request's head did not arrive in time; allowed: {self._connections.head_timeout_s:g} s"
        self._refuse(HttpError(408, message, code="head_timeout"))

    def _refuse(self, error: HttpError) -> None:
        """Answer an invalid request and close the connection."""
        if self._num_requests:
            # The connection is still sending the answer to an earlier request.
            self.cut()
            return
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._set_deadline(LINGER_S, self.cut)

    def _forget(self) -> None:
        self._connections.table.remove(self)
        self._set_deadline(None, self.cut)


REQUEST_ID_HEADER: Final = "X-Request-Id"
SEND_BYTES: Final = 64 << 10
"""Bytes that are handed to the connection at a time. This bounds the unsent data of a client that does not read."""


def given_request_id(headers: Mapping[str, str]) -> str | None:
    """Return the client's id of its request; None if the header is missing or empty.

    Raises:
        InvalidRequest: the id is too long, or has other characters than printable ones of ASCII.
    """
    given = headers.get(REQUEST_ID_HEADER)
    if not given:
        return None
    if not given.isascii():
        # Clients encode other characters in different ways. In the body they are unambiguous.
        raise InvalidRequest(
            field=REQUEST_ID_HEADER, problem=f"is {describe(given)}", allowed="printable ASCII; other ids in the body"
        )
    return check_given_id(REQUEST_ID_HEADER, given)


class Edge:
    """The application that the server calls.

    Args:
        connections: the open connections.
        client_timeout_s: seconds for a client to receive each piece of an answer. After that, its connection is closed.
        health_paths: paths that are answered even if requests use all connections that they may have.
    """

    def __init__(
        self, app: ASGIApp, connections: OpenConnections, client_timeout_s: float, health_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._connections = connections
        self._health_paths = health_paths
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. `request.state.delivery` is its `ResponseSender`."""
        # `HttpConnection` puts itself there.
        connection: HttpConnection = scope["state"]["connection"]
        delivery = ResponseSender(scope, send, connection.transport, self._client_timeout_s)
        scope["state"]["delivery"] = delivery
        connection.begin_request()
        try:
            if scope["path"] in self._health_paths or self._connections.has_room_for(connection):
                await self._app(scope, receive, delivery.send)
            else:
                self._connections.on_cut("busy")
                busy = HttpError(503, "all connections are in use", code="busy", headers={"Connection": "close"})
                await error_response(busy)(scope, receive, delivery.send)
        except asyncio.CancelledError:
            # The server stops and its grace period is over. Only the server cancels this task, so the cancellation ends
            # here.
            if delivery.has_begun:
                await delivery.cut()
            else:
                refusal = error_response(HttpError(503, "the service is stopping", code="stopping"))
                await refusal(scope, receive, delivery.send)
        finally:
            connection.end_request()


class ResponseSender:
    """Sends one answer at the speed at which its client reads.

    Attributes:
        has_begun: True if the answer's status has been sent.
        has_stalled: True if the client did not read in time, so that its connection was closed.
    """

    def __init__(self, scope: Scope, send: Send, transport: asyncio.Transport, timeout_s: float) -> None:
        self.has_begun = False
        self.has_stalled = False
        self._headers = Headers(scope=scope)
        self._has_chunks = scope["http_version"] != "1.0"
        self._transport = transport
        self._send = send
        self._timeout_s = timeout_s

    async def send(self, message: Message) -> None:
        """Send an ASGI message. For the last message, return when the system has received all data.

        Raises:
            ClientDisconnect: the client does not read, or disconnected before the end.
        """
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = list(message["headers"])
            if not self._has_chunks and all(name != b"content-length" for name, _ in headers):
                self._send = unframed(self._send)
            name = REQUEST_ID_HEADER.lower().encode()
            if (name, b"") in headers:
                headers.remove((name, b""))
            elif all(other != name for other, _ in headers):
                headers.append((name, self._request_id().encode()))
            await self._send({**message, "headers": headers})
            return
        body = message.get("body", b"")
        for at in range(0, len(body), SEND_BYTES):
            await self._in_time({**message, "body": body[at : at + SEND_BYTES], "more_body": True})
        if not message.get("more_body", False):
            await self._end()

    def _request_id(self) -> str:
        """Return the client's id, or a random id if it has none or an invalid one, which its route does not use."""
        try:
            given = given_request_id(self._headers)
        except InvalidRequest:
            given = None
        return given or uuid.uuid4().hex

    def limit_wait(self, timeout_s: float) -> None:
        """Limit the time for the client to receive each further piece. A shorter existing limit stays."""
        self._timeout_s = min(self._timeout_s, timeout_s)

    async def _end(self) -> None:
        """Wait until all data is sent.

        A client that does not read must not delay a large last piece without a deadline.
        """
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits(high=0)
        await self._in_time({"type": "http.response.body"})
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()

    async def _in_time(self, message: Message) -> None:
        # The server waits here until most of the earlier data is sent.
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._stall)
        try:
            await self._send(message)
        finally:
            timer.cancel()
        if self.has_stalled or (message.get("more_body", False) and self._transport.is_closing()):
            raise ClientDisconnect

    def _stall(self) -> None:
        self.has_stalled = True
        # `close()` would wait for the client to read.
        self._transport.abort()

    async def cut(self) -> None:
        """Close the connection and discard unsent data."""
        self._transport.abort()
        # Let the server process the closed connection before the request ends.
        await asyncio.sleep(0)
