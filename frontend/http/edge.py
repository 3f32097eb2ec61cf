"""The outermost layer of the service: connections, a request id for every answer, and a deadline for slow readers.

uvicorn and httptools read the requests. The answers are written here, because uvicorn's way takes twice as long for
each event of a stream. The system closes dead connections.
"""

import asyncio
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.request import check_given_id
from .errors import HttpError, error_response

REQUEST_ID_HEADER: Final = "X-Request-Id"
SEND_BYTES: Final = 64 << 10
"""Bytes that are handed to the connection at a time. This bounds the unsent data of a client that does not read."""

MAX_HEAD_BYTES: Final = 64 << 10
"""Limit for a request head."""
MAX_QUEUED: Final = 32
"""Requests of a connection that may wait for earlier answers. Clients that pipeline send fewer. Others are cut off."""
NOT_HTTP: Final = "Invalid HTTP request received."
HOSTS: Final = {"1.0": (0, 1), "1.1": (1,)}
"""Versions of HTTP that are served, and how many `Host` headers a request of them may have."""
_random: list[str] = []
"""The next ids of this process."""
os.register_at_fork(after_in_child=_random.clear)
BODILESS: Final = frozenset({204, 304})
"""Statuses of answers without a body."""


def new_id() -> str:
    """Return a new random id. One system call serves many ids, because each lets another thread run."""
    if not _random:
        digits = os.urandom(4096).hex()
        _random.extend(digits[at : at + 32] for at in range(0, len(digits), 32))
    return _random.pop()


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
        raise InvalidRequest(REQUEST_ID_HEADER, f"is {describe(given)}", "printable ASCII; other ids in the body")
    return check_given_id(REQUEST_ID_HEADER, given)


class IndexedHeaders(Headers):
    """The headers of a request, found without a look at all of them: each request is asked for twenty."""

    def __init__(self, scope: Scope) -> None:
        self._list = scope["headers"]
        self._values: dict[str, list[str]] = {}
        for name, value in self._list:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def getlist(self, key: str) -> list[str]:
        """Return all values of a header."""
        return self._values.get(key.lower(), [])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the first value of a header, or `default`."""
        return self._values.get(key.lower(), (default,))[0]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._values


class HttpRequest(Request):
    """A request whose headers and state are attributes. Those of Starlette are looked up at each use."""

    headers: Any = None
    state: Any = None


class Connection(HttpToolsProtocol):
    """One connection of a client. It limits heads and queues, ignores trailers, and reports the client's disconnect.

    Attributes:
        is_lost: True if the client has disconnected.
        waiting: tasks that are cancelled if the client disconnects.
    """

    scope: Any
    """Scope of the current request. It has no method until the head is complete."""
    cycle: Any
    """The last request that has arrived, and its answer; None before the first request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._proxied: Any = self.app
        self.is_lost = False
        self.waiting: list[asyncio.Task[Any]] = []
        self._unparsed_bytes = 0
        self._is_refused = False

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes. Reject a head, a trailer or the size of a chunk that does not end."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._parse_again(data[upgrade.args[0] :])
        except HttpParserError:
            self._refuse()
        if self._unparsed_bytes > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse()

    def _refuse(self) -> None:
        """Close the connection after the answers that are due, or after 400. Until then, ignore what arrives."""
        self._is_refused = True
        last = self.cycle
        if last is None or last.response_complete:
            self.send_400_response(NOT_HTTP)
            return
        last.keep_alive = False
        # If the body of the last request is complete, the fault is behind it.
        if not last.more_body or last.response_started:
            return
        if self.pipeline:
            refusal: Any = PlainTextResponse(NOT_HTTP, 400)
            self.pipeline[0] = last, refusal
        else:
            self.send_400_response(NOT_HTTP)

    def _parse_again(self, rest: bytes) -> None:
        """Parse a request again without its offer of another protocol, because httptools ignores its body otherwise.

        Args:
            rest: the bytes after the head.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse()
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                lines += [b"connection: close"] if b"close" in value.lower() else []
            elif name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        self.parser = HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Ignore a trailer: a proxy does not check trailers, so a token in one gives no access."""
        if "method" not in self.scope:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application for a request, or queue the request behind earlier ones.

        Raises:
            HttpParserError: it is not HTTP/1.0 or 1.1, its host is not clear, or too many requests are queued.
        """
        self._unparsed_bytes = 0
        if self.parser.should_upgrade():
            return
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in HOSTS or names.count(b"host") not in HOSTS[version] or len(self.pipeline) >= MAX_QUEUED:
            raise HttpParserError(NOT_HTTP)
        # uvicorn's layer for proxies does nothing for other requests.
        self.app = self._proxied if b"x-forwarded-for" in names or b"x-forwarded-proto" in names else self._proxied.app
        # A client of HTTP/1.0 would take 100 for its answer.
        self.expect_100_continue &= version == "1.1"
        super().on_headers_complete()
        self.scope["state"].update(connection=self, cycle=self.cycle)

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            # uvicorn pauses for a long body and for a queued request. A disconnect is noticed only by reading.
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the blocks that need the client."""
        super().connection_lost(exc)
        self.is_lost = True
        for task in self.waiting:
            task.cancel()


class while_connected(AbstractContextManager[None]):  # noqa: N801
    """Cancels the block if the client of a request disconnects.

    A class, because each request enters several, and a generator takes three times as long.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    def __init__(self, scope: Scope) -> None:
        self._connection: Connection = scope["state"]["connection"]

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if self._connection.is_lost or task is None:
            raise ClientDisconnect
        self._task = task
        self._cancelling = task.cancelling()
        self._connection.waiting.append(task)

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        self._connection.waiting.remove(self._task)
        if kind is None or not issubclass(kind, asyncio.CancelledError) or not self._connection.is_lost:
            return
        # Another cancellation, for example by the server, has precedence.
        if self._task.uncancel() <= self._cancelling:
            raise ClientDisconnect from None


class Edge:
    """The application that the server calls.

    Args:
        client_timeout_s: seconds for a client to receive each piece of an answer. After that, its answer ends.
    """

    def __init__(self, app: ASGIApp, client_timeout_s: float) -> None:
        self._app = app
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, _send: Send) -> None:
        """Answer one request. `request.state.delivery` is its `ResponseSender`."""
        delivery = ResponseSender(scope, self._client_timeout_s)
        scope["state"].update(delivery=delivery, headers=IndexedHeaders(scope))
        try:
            await self._app(scope, receive, delivery.send)
        except asyncio.CancelledError:
            # The server stops and its grace period is over. Only the server cancels this task, so the cancellation ends
            # here. The server closes the connection of an answer that is not complete.
            if not delivery.has_begun:
                refusal = error_response(HttpError(503, "the service is stopping", code="stopping"))
                await refusal(scope, receive, delivery.send)
        # uvicorn notes a disconnect only for the last request that has arrived, and logs an error for others.
        scope["state"]["cycle"].disconnected |= scope["state"]["connection"].is_lost


class ResponseSender:
    """Sends one answer at the speed at which its client reads.

    Attributes:
        has_begun: True if the answer's status has been sent.
        has_stalled: True if the client did not read in time.
    """

    def __init__(self, scope: Scope, timeout_s: float) -> None:
        self.has_begun = False
        self.has_stalled = False
        self._scope = scope
        self._connection: Connection = scope["state"]["connection"]
        self._cycle: RequestResponseCycle = scope["state"]["cycle"]
        self._timeout_s = timeout_s
        self._has_body = self._is_chunked = True
        self._head = b""

    async def send(self, message: Message) -> None:
        """Send an ASGI message.

        Raises:
            ClientDisconnect: the client does not read.
        """
        if message["type"] == "http.response.start":
            self.begin(message["status"], message["headers"])
            self._write(b"")
            return
        await self.write(message.get("body", b""), is_last=not message.get("more_body", False))

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body. Its first part goes out with the head, and its last part with the end of the body.

        Raises:
            ClientDisconnect: the client does not read.
        """
        if len(data) > SEND_BYTES:
            for at in range(0, len(data), SEND_BYTES):
                await self.write(data[at : at + SEND_BYTES])
            data = b""
        if self._cycle.flow.write_paused:
            await self._drain()
        if self._is_chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if is_last else b"")
        self._write(data if self._has_body else b"")
        if is_last:
            await self._end()

    def _write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
            self.has_begun = self._cycle.response_started = True
        if data and not self._connection.is_lost:
            self._cycle.transport.write(data)

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the answer. Its head is sent with the first part of the body, which must follow at once."""
        cycle, method, version = self._cycle, self._scope["method"], self._scope["http_version"]
        self._has_body = method != "HEAD" and status not in BODILESS
        self._is_chunked = self._has_body and version == "1.1"
        lines, has_id = [STATUS_LINE[status]], False
        for name, value in [*cycle.default_headers, *headers]:
            if name == b"x-request-id":
                has_id = True
                if not value:
                    continue
            elif name == b"content-length":
                self._is_chunked = False
            elif name == b"connection" and value.lower() == b"close":
                cycle.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if not has_id:
            lines += b"x-request-id: ", self._request_id().encode(), b"\r\n"
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        # A client that asked whether to send its body leaves it out now, and this connection would read what follows as
        # that body.
        cycle.keep_alive &= not (cycle.waiting_for_100_continue and cycle.more_body)
        cycle.waiting_for_100_continue = False
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    async def _end(self) -> None:
        cycle = self._cycle
        # The server waits here until most of the data is sent.
        if cycle.flow.write_paused:
            await self._drain()
        if self._connection.is_lost:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def _request_id(self) -> str:
        """Return the client's id, or a random id if it has none or an invalid one, which its route does not use."""
        try:
            given = given_request_id(self._scope["state"]["headers"])
        except InvalidRequest:
            given = None
        return given or new_id()

    def limit_wait(self, timeout_s: float) -> None:
        """Limit the time for the client to receive each further piece. A shorter existing limit stays."""
        self._timeout_s = min(self._timeout_s, timeout_s)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._cycle.flow.drain()
        except TimeoutError:
            self.has_stalled = True
            raise ClientDisconnect from None
