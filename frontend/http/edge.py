"""What holds for every answer, whichever part of the application gives it: a request id, and clients that take it."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...schemas.checks import check_request_id
from ...schemas.errors import InvalidRequest
from .connections import HttpConnection, OpenConnections
from .errors import HttpError, error_response

__all__ = ["REQUEST_ID_HEADER", "SEND_BYTES", "Edge", "ResponseSender", "given_request_id"]

REQUEST_ID_HEADER: Final = "X-Request-Id"
SEND_BYTES: Final = 64 << 10
"""Handed to the connection at a time: not much more waits there for a client that does not read."""


def given_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's id of its request; None if there is none that can be used.

    Proxies set the header as they like: it is no reason to refuse what somebody asks for.
    """
    given = headers.get(REQUEST_ID_HEADER)
    try:
        return None if given is None else check_request_id(REQUEST_ID_HEADER, given)
    except InvalidRequest:
        return None


class Edge:
    """The application as the server calls it.

    Args:
        connections: all that are open.
        client_timeout_s: what a client has to take each piece of an answer; then its connection is cut.
        health_paths: answered also when requests have all the connections that they may have.
    """

    def __init__(
        self, app: ASGIApp, connections: OpenConnections, client_timeout_s: float, health_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._connections = connections
        self._health_paths = health_paths
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `request.state.delivery` says how its client takes that."""
        # Put there by itself.
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
            # The server stops, and has waited long enough; nobody else cancels it, and it ends here.
            if delivery.has_begun:
                await delivery.cut()
            else:
                refusal = error_response(HttpError(503, "the service stops", code="stopping"))
                await refusal(scope, receive, delivery.send)
        finally:
            connection.end_request()


class ResponseSender:
    """Sends one answer, no faster than its client reads.

    Attributes:
        has_begun: the answer's status has been sent.
        has_stalled: the client has not read for so long that its connection was cut.
    """

    def __init__(self, scope: Scope, send: Send, transport: asyncio.Transport, timeout_s: float) -> None:
        self.has_begun = False
        self.has_stalled = False
        self._headers = Headers(scope=scope)
        self._transport = transport
        self._send = send
        self._timeout_s = timeout_s

    async def send(self, message: Message) -> None:
        """As ASGI's; an answer's end comes back when the system has all of it.

        Raises:
            ClientDisconnect: the client does not read, or left before the end.
        """
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = list(message["headers"])
            if all(name != REQUEST_ID_HEADER.lower().encode() for name, _ in headers):
                request_id = given_request_id(self._headers) or uuid.uuid4().hex
                headers.append((REQUEST_ID_HEADER.lower().encode(), request_id.encode()))
            await self._send({**message, "headers": headers})
            return
        body = message.get("body", b"")
        for at in range(0, len(body), SEND_BYTES):
            await self._in_time({**message, "body": body[at : at + SEND_BYTES], "more_body": True})
        if not message.get("more_body", False):
            await self._end()

    def limit_wait(self, timeout_s: float) -> None:
        """Give the client no more than so long to take each further piece."""
        self._timeout_s = min(self._timeout_s, timeout_s)

    async def _end(self) -> None:
        """Wait until all is on its way: a large answer's last piece must not be left to a client that does not read."""
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits(high=0)
        await self._in_time({"type": "http.response.body"})
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()

    async def _in_time(self, message: Message) -> None:
        # The server waits while more than a little of what was sent before is not on its way.
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._stall)
        try:
            await self._send(message)
        finally:
            timer.cancel()
        if self.has_stalled or (message.get("more_body", False) and self._transport.is_closing()):
            raise ClientDisconnect

    def _stall(self) -> None:
        self.has_stalled = True
        # Closing would wait for the client to read.
        self._transport.abort()

    async def cut(self) -> None:
        """End the connection, whatever waits to be sent."""
        self._transport.abort()
        # The server hears of it before the request ends.
        await asyncio.sleep(0)
