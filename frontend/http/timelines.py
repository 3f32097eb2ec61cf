"""Routes that return the recorded history of a request, and lists of requests, from the workers that had them."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...bus import RequestList
from ...schemas.errors import InvalidRequest
from ..request_traces import RequestAnswer, RequestQuery, answer_of, find_timelines, unknown_request
from .control.reading import read_query
from .errors import HttpError, http_error
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["TIMELINE_ROUTES"]


class IdQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of which the history is read."""

    id: str
    """Id of the request."""


async def request_timelines(service: Service, request: Request) -> Response:
    """Return the history of a request: each attempt with its worker, times, pauses, weight versions and end.

    Workers remember their open requests and the last 1,000 that ended. The id is the value of `X-Request-Id` or the id
    of an OpenAI answer. The query parameter `id` may be any id. A path cannot contain `/`, `.` and `..` as ids.
    """
    name = request.path_params.get("id")
    if name is None:
        name = read_query(request, IdQuery).id
    try:
        trace = await find_timelines(service.rb.fleet, name)
    except InvalidRequest as error:
        raise http_error(error, {"request_id": "id"}) from None
    if not trace.timelines:
        raise HttpError(404, unknown_request(trace), code="unknown_request", param="id")
    return json_response(answer_of(trace))


async def request_list(service: Service, request: Request) -> Response:
    """Return the requests that run, are slowest, failed or were resumed, by client, model and worker.

    Requests that wait in the queue are at no worker and in no list.
    """
    return json_response(await read_query(request, RequestQuery).read(service.rb.fleet))


TIMELINE_ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/requests"): HttpRoute(request_timelines, answer=RequestAnswer, query=IdQuery),
    ("GET", "/v1/rl/requests/{id}"): HttpRoute(request_timelines, answer=RequestAnswer),
    ("GET", "/v1/rl/request_list"): HttpRoute(request_list, answer=RequestList, query=RequestQuery),
}
