"""The outermost layer of the service: a request id for every answer, and a deadline for clients that do not read.

The server and the system close idle and dead connections. What only the server sees, such as an incomplete head, is
left to a proxy.
"""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.request import check_given_id
from .errors import HttpError, error_response

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
        client_timeout_s: seconds for a client to receive each piece of an answer. After that, its answer ends.
    """

    def __init__(self, app: ASGIApp, client_timeout_s: float) -> None:
        self._app = app
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. `request.state.delivery` is its `ResponseSender`."""
        delivery = ResponseSender(scope, send, self._client_timeout_s)
        scope["state"]["delivery"] = delivery
        try:
            await self._app(scope, receive, delivery.send)
        except asyncio.CancelledError:
            # The server stops and its grace period is over. Only the server cancels this task, so the cancellation ends
            # here. The server closes the connection of an answer that is not complete.
            if not delivery.has_begun:
                refusal = error_response(HttpError(503, "the service is stopping", code="stopping"))
                await refusal(scope, receive, delivery.send)


class ResponseSender:
    """Sends one answer at the speed at which its client reads.

    Attributes:
        has_begun: True if the answer's status has been sent.
        has_stalled: True if the client did not read in time.
    """

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        self.has_begun = False
        self.has_stalled = False
        self._headers = Headers(scope=scope)
        self._send = send
        self._timeout_s = timeout_s

    async def send(self, message: Message) -> None:
        """Send an ASGI message.

        Raises:
            ClientDisconnect: the client does not read.
        """
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers, name = list(message["headers"]), REQUEST_ID_HEADER.lower().encode()
            if (name, b"") in headers:
                headers.remove((name, b""))
            elif all(other != name for other, _ in headers):
                headers.append((name, self._request_id().encode()))
            await self._send({**message, "headers": headers})
            return
        body = message.get("body", b"")
        for at in range(0, len(body), SEND_BYTES):
            await self._send_in_time({**message, "body": body[at : at + SEND_BYTES], "more_body": True})
        if not message.get("more_body", False):
            await self._send_in_time({"type": "http.response.body"})

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

    async def _send_in_time(self, message: Message) -> None:
        try:
            # The server waits here until most of the earlier data is sent.
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            self.has_stalled = True
            raise ClientDisconnect from None
