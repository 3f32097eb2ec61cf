"""The viewers, and the events that wait to be sent to each of them: only the newest event of each name."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..edge import while_connected
from ..errors import HttpError
from .events import EventName

logger = logging.getLogger(__name__)


MAX_VIEWERS: Final = 200
"""Limit on viewers, far more than people who watch one fleet. At 1 MB/s each, more viewers would fill a network."""
KEPT_FOR_ADMINS: Final = 20
"""Number of these places that are reserved for admins, so that viewers with the other token cannot lock them out."""
VIEWER_TIMEOUT_S: Final = 30.0
"""Seconds for a viewer to read a piece of an event. A slower viewer loses its connection: it is 30 events behind."""


class Viewer:
    """One stream of events.

    A viewer that reads slowly receives fewer events: a new event replaces an unsent event of the same name.
    """

    def __init__(self) -> None:
        self._pending: dict[EventName, bytes] = {}
        self._changed = asyncio.Event()
        self.has_ended = False

    def offer(self, name: EventName, event: bytes) -> None:
        """Send an event after the earlier ones, unless a newer event of the same name replaces it first."""
        self._pending[name] = event
        self._changed.set()

    def end(self) -> None:
        """End the stream after the event that is being sent."""
        self.has_ended = True
        self._changed.set()

    async def send_to(self, send: Send) -> None:
        """Send events as they arrive, until the stream ends."""
        while not self.has_ended:
            await self._changed.wait()
            self._changed.clear()
            while self._pending and not self.has_ended:
                event = self._pending.pop(next(iter(self._pending)))
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Viewers:
    """The viewers, at most `MAX_VIEWERS`."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()
        self.some = asyncio.Event()
        self.none = asyncio.Event()
        self.none.set()
        self._has_ended = False

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    def __iter__(self) -> Iterator[Viewer]:
        """Iterate over a copy, so that viewers may leave meanwhile."""
        return iter(tuple(self._viewers))

    @contextmanager
    def joined(self, viewer: Viewer, *, is_admin: bool) -> Iterator[None]:
        """Count a viewer while the block lasts.

        Args:
            is_admin: the viewer may change the fleet, and use the places that are reserved for admins.

        Raises:
            HttpError: 503, there are too many viewers, or the service stops.
        """
        if self._has_ended:
            raise HttpError(503, "the service stops", code="stopping")
        allowed = MAX_VIEWERS if is_admin else MAX_VIEWERS - KEPT_FOR_ADMINS
        if len(self._viewers) >= allowed:
            message = f"{len(self._viewers)} viewers watch; allowed: {allowed}"
            if not is_admin:
                message += f", and {KEPT_FOR_ADMINS} more with the token of admins"
            raise HttpError(503, message, code="too_many_viewers")
        self._viewers.add(viewer)
        self.some.set()
        self.none.clear()
        try:
            yield
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self.some.clear()
                self.none.set()

    def offer(self, name: EventName, event: bytes) -> None:
        """Send an event to all viewers."""
        for viewer in self._viewers:
            viewer.offer(name, event)

    def end(self) -> None:
        """End all streams and reject new viewers."""
        self._has_ended = True
        for viewer in self:
            viewer.end()


class ViewerStream(Response):
    """Response with server-sent events for one viewer, until it leaves or the service stops."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, viewer: Viewer) -> None:
        # A proxy that buffers the answer would delay events. The second header disables this in nginx.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        self._request.state.delivery.limit_wait(VIEWER_TIMEOUT_S)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with while_connected(scope):
            await self._viewer.send_to(send)


@contextmanager
def contained(part: str) -> Iterator[None]:
    """Log an error of the body, which is this part of the view, and continue after the body. Cancellation passes."""
    try:
        yield
    except Exception:
        # Boundary: an error in the live view must not stop the service that trainers use.
        logger.exception("view.failed part=%s", part)
