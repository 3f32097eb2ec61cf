"""The routes for people who watch."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..access import has_access
from ..control.reading import read_query
from ..service import HttpRoute, RouteTable, Service
from .events import HELLO
from .viewers import Viewer, ViewerStream

__all__ = ["ROUTES"]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a viewer wants to see beside the fleet."""


async def events(service: Service, request: Request) -> Response:
    """The fleet as server-sent events, once a second: `hello`, then `fleet`; see docs/http.md.

    A slow reader gets the newest event of each name, and not those before it.
    """
    read_query(request, EventsQuery)
    if request.method == "HEAD":
        return Response(media_type=ViewerStream.media_type)
    connection = request.scope["state"]["connection"]
    viewer = Viewer(connection.cut)
    request.state.until_answered.enter_context(service.live.viewers.joined(viewer))
    connection.begin_watching()
    may_act = has_access(request, service.settings.admin_token)
    viewer.offer(HELLO, service.live.hello(may_act=may_act))
    return ViewerStream(request, viewer)


ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/events"): HttpRoute(events, answer="text/event-stream", query=EventsQuery),
}
