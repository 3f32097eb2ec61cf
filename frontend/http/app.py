"""The application: which routes there are, who may call them, and how their errors are answered."""

import logging
from contextlib import ExitStack

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import bus
from frontend.http import control, generate, openapi, status, tokenize
from frontend.http.access import check_access
from frontend.http.calls import Admission
from frontend.http.errors import HttpError, error_response, http_error
from frontend.http.openai import routes as openai
from frontend.http.service import Handler, RouteTable, Service
from frontend.http.settings import Settings
from schemas.errors import RollbusError

__all__ = ["described", "make_app"]

logger = logging.getLogger(__name__)

OPEN: RouteTable = {**status.OPEN_ROUTES, **openapi.ROUTES}
"""For everybody: whether the service lives, and what it serves."""
DATA: RouteTable = {**status.ROUTES, **generate.ROUTES, **tokenize.ROUTES, **openai.ROUTES, **control.ROUTES}
"""With the data token, or that of admins."""
ADMIN: RouteTable = {**control.ADMIN_ROUTES}
"""With the admin token: they change the fleet."""
BODIES: dict[tuple[str, str], object] = {**generate.BODIES, **tokenize.BODIES, **openai.BODIES, **control.BODIES}
"""What routes decode from bodies, for the OpenAPI document; None: nothing."""
QUERIES: dict[tuple[str, str], type] = {**control.QUERIES}
"""Structs of what routes read from the query, for the same."""
ANSWERS: dict[tuple[str, str], openapi.Answer] = {
    **status.ANSWERS,
    **generate.ANSWERS,
    **tokenize.ANSWERS,
    **openai.ANSWERS,
    **control.ANSWERS,
}
"""What routes answer, for the same; see there."""
CLIENT_GONE = 499
"""nginx's word for it: nobody reads this answer."""
CLIENT_STALLED = 408
"""Likewise: it did not read its answer in time."""
NO_ROUTE = "none"
"""Stands for the path of a request that none of the routes takes, in metrics."""


def make_app(rb: bus.Client, settings: Settings) -> Starlette:
    """Make the application on top of a client that is connected, and stays so while it serves."""
    service = Service(rb, settings, Admission(settings.max_in_flight))
    routes: list[BaseRoute] = [
        *_routes(service, OPEN, None),
        *_routes(service, DATA, settings.token, settings.admin_token),
        *_routes(service, ADMIN, settings.admin_token),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _bug})
    app.state.service = service
    app.state.openapi = msgspec.json.encode(openapi.document(described(), settings))
    return app


def described() -> openapi.Routes:
    """All routes, for the OpenAPI document."""
    return openapi.Routes(open=OPEN, data=DATA, admin=ADMIN, bodies=BODIES, queries=QUERIES, answers=ANSWERS)


def _routes(service: Service, table: RouteTable, *tokens: str | None) -> list[BaseRoute]:
    return [
        Route(path, _Endpoint(service, path, handler, tokens), methods=[method])
        for (method, path), handler in table.items()
    ]


class _Endpoint:
    """A handler as Starlette calls it: counted, with access checked, and with errors as answers."""

    def __init__(self, service: Service, path: str, handler: Handler, tokens: tuple[str | None, ...]) -> None:
        self._service = service
        self._path = path
        self._handler = handler
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with self._service.metrics.request(request.method, self._path) as seen, ExitStack() as until_answered:
            request.state.until_answered = until_answered
            try:
                response = await self._answer(request)
                seen.status = response.status_code
                await response(scope, receive, send)
            except ClientDisconnect:
                has_stalled = request.state.delivery.has_stalled
                seen.status = CLIENT_STALLED if has_stalled else CLIENT_GONE
                logger.info("client.%s path=%s", "stalled" if has_stalled else "gone", request.url.path)

    async def _answer(self, request: Request) -> Response:
        try:
            check_access(request, *self._tokens)
            return await self._handler(self._service, request)
        except HttpError as error:
            return error_response(error)
        except RollbusError as error:
            return error_response(http_error(error))


async def _no_route(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, HTTPException):
        raise exc
    service: Service = request.app.state.service
    with service.metrics.request("any", NO_ROUTE) as seen:
        seen.status = exc.status_code
    code = {404: "unknown_route", 405: "wrong_method"}.get(exc.status_code, "http_error")
    return error_response(HttpError(exc.status_code, exc.detail, code=code, headers=exc.headers))


async def _bug(_request: Request, _exc: Exception) -> Response:
    # The server logs the traceback; who asked is told no more than that it was not their fault.
    return error_response(HttpError(500, "the service has failed", code="internal_error"))
