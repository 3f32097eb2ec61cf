"""Routes of the live view."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....bus.protocol.telemetry.rates import STEP_S
from ....schemas.checks import describe
from ....schemas.limits import MAX_NAME_CHARS
from ..access import has_access
from ..calls import json_response
from ..control.bodies import read_query
from ..errors import HttpError, invalid
from ..service import HttpRoute, RouteTable, Service
from .events import HistoryAnswer
from .viewers import Viewer, ViewerStream


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The feed that a viewer requests in addition to the fleet."""

    experts: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """Model whose load of experts is sent every 5 s."""
    worker: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """The only worker whose experts are counted; null: up to 64 sampled workers."""


async def events(service: Service, request: Request) -> Response:
    """Stream the fleet as server-sent events: `hello`, `day`, then `fleet` and `experts`. See docs/http.md.

    A slow reader receives only the newest event of each name.
    """
    query = read_query(request, EventsQuery)
    if query.worker is not None and query.experts is None:
        raise invalid("worker", "is given without experts", "together with the model whose experts are meant")
    if request.method == "HEAD":
        return Response(media_type=ViewerStream.media_type)
    viewer = Viewer()
    is_admin = has_access(request, service.settings.admin_token)
    viewer.offer("hello", service.live.hello(may_act=is_admin))
    viewer.offer("day", service.live.day())
    request.state.until_answered.enter_context(service.live.viewers.joined(viewer, is_admin=is_admin))
    if query.experts is not None:
        feed = service.live.experts.joined(viewer, query.experts, query.worker, is_admin=is_admin)
        request.state.until_answered.enter_context(feed)
    return ViewerStream(request, viewer)


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requested points."""

    since: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Return the points after this number; 0: all points of the last hour."""
    worker: str | None = None
    """Return the points of this worker too."""


async def history(service: Service, request: Request) -> Response:
    """Return the last hour of the fleet and of each model, a point every 5 s; with `worker`, that worker's too."""
    query = read_query(request, HistoryQuery)
    kept = service.live.history
    workers = {}
    if query.worker is not None:
        found = kept.worker(query.worker, query.since)
        if found is None:
            message = f"worker {describe(query.worker)} has no history; allowed: a worker of the last hour"
            raise HttpError(404, message, code="unknown_worker", param="worker")
        workers[query.worker] = found
    return json_response(
        HistoryAnswer(
            number=kept.number,
            step_s=STEP_S,
            end=service.live.time_of(kept.number),
            fleet=kept.fleet(query.since),
            models=kept.models(query.since),
            workers=workers,
        )
    )


ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/events"): HttpRoute(events, answer="text/event-stream", query=EventsQuery),
    ("GET", "/v1/rl/history"): HttpRoute(history, answer=HistoryAnswer, query=HistoryQuery),
}
