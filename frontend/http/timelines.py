"""What became of a request, from the workers that had it."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ..request_ids import find_timelines
from .errors import HttpError
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["ROUTES"]


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers tell of a request."""

    request_id: str
    """As its client named it."""
    timelines: tuple[bus.WorkerTimeline, ...]
    """One for each attempt of each sample at each worker, in the order of attempts."""
    workers_asked: int
    """Live workers."""
    workers_answered: int
    """Of these, those that did in time."""
    silent: tuple[str, ...]
    """The others, by id: what they had to do with the request is not known."""
    left_out: int
    """Earlier timelines, for which the answers had no room."""


async def request_timelines(service: Service, request: Request) -> Response:
    """Tell what became of a request: each attempt with its worker, times, pauses, versions and end.

    Workers remember their requests in flight and the last 1,000 that ended. The id is that of `X-Request-Id`, or of an
    OpenAI answer.
    """
    name = request.path_params["id"]
    trace = await find_timelines(service.rb.fleet, name)
    if not trace.timelines:
        unknown = f"request {name!r} is unknown to {trace.workers_answered} of {trace.workers_asked} workers, each of "
        unknown += "which remembers its last 1,000 requests"
        if trace.silent:
            unknown += f"; {', '.join(list(trace.silent)[:5])} did not answer"
        raise HttpError(404, unknown, code="unknown_request", param="id")
    return json_response(
        RequestAnswer(
            request_id=trace.request_id,
            timelines=trace.timelines,
            workers_asked=trace.workers_asked,
            workers_answered=trace.workers_answered,
            silent=tuple(trace.silent),
            left_out=trace.left_out,
        )
    )


ROUTES: Final[RouteTable] = {("GET", "/v1/rl/requests/{id}"): HttpRoute(request_timelines, answer=RequestAnswer)}
