"""Route that returns the recorded history of a request from the workers that had it."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ..request_traces import RequestAnswer, answer_of, find_timelines, unknown_request
from .errors import HttpError
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["ROUTES"]


async def request_timelines(service: Service, request: Request) -> Response:
    """Return the history of a request: each attempt with its worker, times, pauses, weight versions and end.

    Workers remember their open requests and the last 1,000 that ended. The id is the value of `X-Request-Id` or the id
    of an OpenAI answer.
    """
    name = request.path_params["id"]
    trace = await find_timelines(service.rb.fleet, name)
    if not trace.timelines:
        raise HttpError(404, unknown_request(trace), code="unknown_request", param="id")
    return json_response(answer_of(trace))


ROUTES: Final[RouteTable] = {("GET", "/v1/rl/requests/{id}"): HttpRoute(request_timelines, answer=RequestAnswer)}
