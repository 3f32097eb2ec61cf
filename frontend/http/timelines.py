"""What became of a request, from the workers that had it."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ..request_traces import RequestAnswer, answer_of, find_timelines, unknown_request
from .errors import HttpError
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["ROUTES"]


async def request_timelines(service: Service, request: Request) -> Response:
    """Tell what became of a request: each attempt with its worker, times, pauses, versions and end.

    Workers remember their requests in flight and the last 1,000 that ended. The id is that of `X-Request-Id`, or of an
    OpenAI answer.
    """
    name = request.path_params["id"]
    trace = await find_timelines(service.rb.fleet, name)
    if not trace.timelines:
        raise HttpError(404, unknown_request(trace), code="unknown_request", param="id")
    return json_response(answer_of(trace))


ROUTES: Final[RouteTable] = {("GET", "/v1/rl/requests/{id}"): HttpRoute(request_timelines, answer=RequestAnswer)}
