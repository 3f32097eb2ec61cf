"""The outermost ASGI layer: it adds a request id to every answer, and deadlines for clients that read slowly."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.request_ids import check_given_id
from .connections import HttpConnection, OpenConnections, unframed
from .errors import HttpError, error_response

__all__ = ["REQUEST_ID_HEADER", "SEND_BYTES", "Edge", "ResponseSender", "given_request_id"]

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
