"""Those who watch, and what waits to be sent to each: of every kind of event the newest, and nothing older."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..calls import until_disconnect
from ..errors import HttpError
from .events import EventName

__all__ = ["KEPT_FOR_ADMINS", "MAX_VIEWERS", "VIEWER_TIMEOUT_S", "Viewer", "ViewerStream", "Viewers"]

MAX_VIEWERS: Final = 200
"""Far more people than look at one fleet. At a megabyte a second each they would fill a network."""
KEPT_FOR_ADMINS: Final = 20
"""Of these places: holders of the other token cannot fill all of them, and keep an admin out."""
VIEWER_TIMEOUT_S: Final = 30.0
"""For a viewer to read a piece of an event. One that does not has thirty newer ones to come back for."""


class Viewer:
    """One stream of events.

    A viewer that reads slowly gets fewer events: each that was not sent yet is replaced by the next of its name.

    Args:
        cut: closes its connection at once.
    """

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._pending: dict[EventName, bytes] = {}
        self._changed = asyncio.Event()
        self._is_sending = False
        self.has_ended = False

    def __repr__(self) -> str:
        """One line with what waits."""
        return f"<Viewer pending={list(self._pending)} sending={self._is_sending}>"

    def offer(self, name: EventName, event: bytes) -> None:
        """Have an event sent as soon as those before it are, unless a newer one of its name comes first."""
        self._pending[name] = event
        self._changed.set()

    def end(self) -> None:
        """End the stream at once: one whose viewer does not read, by closing its connection."""
        self.has_ended = True
        self._changed.set()
        if self._is_sending:
            self._cut()

    async def send_to(self, send: Send) -> None:
        """Send events as they come, until the stream ends."""
        while not self.has_ended:
            await self._changed.wait()
            self._changed.clear()
            while self._pending and not self.has_ended:
                event = self._pending.pop(next(iter(self._pending)))
                self._is_sending = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._is_sending = False
        await send({"type": "http.response.body", "body": b""})


class Viewers:
    """All who watch, at most `MAX_VIEWERS`."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._has_ended = False

    def __repr__(self) -> str:
        """One line with their number."""
        return f"<Viewers {len(self)}>"

    def __len__(self) -> int:
        """How many watch."""
        return len(self._viewers)

    def __iter__(self) -> Iterator[Viewer]:
        """Each of them; one may leave meanwhile."""
        return iter(tuple(self._viewers))

    @contextmanager
    def joined(self, viewer: Viewer, *, is_admin: bool) -> Iterator[None]:
        """Count a viewer while the block lasts.

        Args:
            is_admin: the viewer may change the fleet, and use the places that are kept for admins.

        Raises:
            HttpError: 503, so many watch already, or the service stops.
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
        self._some.set()
        self._none.clear()
        try:
            yield
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._some.clear()
                self._none.set()

    async def until_none(self) -> None:
        """Wait until nobody watches."""
        await self._none.wait()

    async def until_some(self) -> None:
        """Wait until somebody watches."""
        await self._some.wait()

    def offer(self, name: EventName, event: bytes) -> None:
        """Have an event sent to all."""
        for viewer in self._viewers:
            viewer.offer(name, event)

    def end(self) -> None:
        """End all streams, and begin no more."""
        self._has_ended = True
        for viewer in self:
            viewer.end()


class ViewerStream(Response):
    """Server-sent events to one viewer, until it leaves or the service stops."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, viewer: Viewer) -> None:
        # Proxies that gather an answer's pieces would hold events back: nginx is told not to.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        self._request.state.delivery.limit_wait(VIEWER_TIMEOUT_S)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await until_disconnect(receive, self._viewer.send_to(send))
