"""The ASGI application: its routes, access to them, and the format of errors."""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import bus
from ...schemas.checks import describe
from ...schemas.decoding import nearest
from ...schemas.errors import RollbusError
from . import Settings, chat, control, docs, generate, page, status
from .access import check_access, check_media_type, check_origin
from .agents import routes as agents
from .agents.message_blocks import message_error
from .calls import Admission
from .control import reads
from .control.services import Services
from .edge import HttpRequest, new_id
from .errors import HttpError, error_response, http_error
from .live import routes as live
from .metrics import HttpRequestRecord
from .openai import routes as openai
from .openai.parsers import Parsers
from .requests import find_announced, given_trace, server_span
from .service import HttpRoute, RouteTable, Service, of_fleet
from .sessions import routes as sessions
from .sessions.manager import Sessions
from .trainers import skyrl, slime, vime

logger = logging.getLogger(__name__)

OPEN: RouteTable = {**status.OPEN_ROUTES, **docs.ROUTES, **page.ROUTES, **sessions.KEY_ROUTES}
"""Routes without a token: health, the served models, the API description, the page without its data, and the routes of
agents, which check the key of their session."""
DATA: RouteTable = {
    **status.ROUTES,
    **generate.ROUTES,
    **chat.ROUTES,
    **openai.ROUTES,
    **agents.ROUTES,
    **control.ROUTES,
    **live.ROUTES,
    **skyrl.ROUTES,
    **vime.ROUTES,
    **sessions.ROUTES,
}
"""Routes that require the data token or the admin token."""
ADMIN: RouteTable = {
    **control.ADMIN_ROUTES,
    **reads.TIMELINE_ROUTES,
    **skyrl.ADMIN_ROUTES,
    **slime.ADMIN_ROUTES,
    **vime.ADMIN_ROUTES,
}
"""Routes that require the admin token: they change the fleet or show other clients' requests."""
CLIENT_GONE = 499
"""nginx's status: the client disconnected before it had the answer."""
CLIENT_STALLED = 408
"""The client did not read its answer in time."""
NO_ROUTE = "none"
"""Value of the `route` label in metrics if no route matches the path."""


def make_app(rb: bus.Client, settings: Settings, parsers: Parsers | None = None) -> Starlette:
    """Create the application for a connected client, which must stay connected while the application serves."""
    service = Service(rb, settings, Admission(settings.max_in_flight), parsers)
    service.sessions, service.serve_turn = Sessions(rb), sessions.serve
    service.services, service.targets = Services(service), of_fleet(service.workers, find_announced)
    endpoints = {
        **_endpoints(service, OPEN, None),
        **_endpoints(service, DATA, settings.token, settings.admin_token),
        **_endpoints(service, ADMIN, settings.admin_token),
    }
    routes = [Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()]
    # A web page does not know the token. If a token is missing, the origin check separates pages from clients.
    is_open = settings.token is None or settings.admin_token is None
    app = _App(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _bug})
    app.state.service, app.checks_origin = service, is_open
    app.direct = {each: endpoint for each, endpoint in endpoints.items() if "{" not in each[1]}
    # The document takes a tenth of a second, and few programs read it.
    app.state.openapi = cache(lambda: msgspec.json.encode(docs.document(OPEN, DATA, ADMIN, settings)))
    return app


def _endpoints(service: Service, table: RouteTable, *tokens: str | None) -> dict[tuple[str, str], ASGIApp]:
    return {each: _Endpoint(service, each[1], route, tokens) for each, route in table.items()}


class _App(Starlette):
    """Starlette's application. It calls the endpoint of a known path at once, because Starlette tries all routes."""

    direct: Mapping[tuple[str, str], ASGIApp]
    """Endpoints by method and path, except of paths with parameters."""
    checks_origin: bool
    """True: requests from web pages of other origins are 403."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope["app"], service, own = self, self.state.service, (scope["method"], scope["path"])
        answer: ASGIApp = self.direct.get(own, super().__call__)
        try:
            if self.checks_origin:
                headers, allowed = scope["state"]["headers"], service.settings.allowed_hosts
                check_origin(headers, allowed, allows_links=own == ("GET", "/"))
        except HttpError as error:
            answer = _reject(service, scope["path"], error)
        try:
            await answer(scope, receive, send)
        except Exception as exc:
            # Boundary of one request, as in Starlette. The server logs the traceback.
            if not scope["state"]["delivery"].has_begun:
                await (await _bug(Request(scope), exc))(scope, receive, send)
            raise


class _Endpoint:
    """Wraps a handler for Starlette: counts requests, checks access, and converts errors to answers."""

    def __init__(self, service: Service, path: str, route: HttpRoute, tokens: tuple[str | None, ...]) -> None:
        self._service = service
        self._path = path
        self._route = route
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, method = HttpRequest(scope, receive), scope["method"]
        request.headers, request.state = scope["state"]["headers"], State(scope["state"])
        trusted, tracer, trace = self._service.settings.trusts_traceparent, self._service.tracer, None
        if method == "POST":
            trace = given_trace(request.headers, is_trusted=trusted)
        with HttpRequestRecord(self._service.metrics, method, self._path) as seen, ExitStack() as until_answered:
            # Requests that only read have no span, because they are frequent and reach no worker.
            if tracer is not None and method == "POST":
                span = server_span(tracer, request, self._path, seen, trace, is_trusted=trusted)
                trace = until_answered.enter_context(span)
            # `request.state` has these.
            scope["state"].update(until_answered=until_answered, seen=seen, trace=trace, waited_s=0.0, new_id=new_id())
            scope["state"]["began_at"] = time.monotonic()
            try:
                response = await self._answer(request, method)
                seen.status = response.status_code
                await response(scope, receive, send)
            except ClientDisconnect:
                has_stalled = request.state.delivery.has_stalled
                seen.status = CLIENT_STALLED if has_stalled else CLIENT_GONE
                logger.info("client.%s path=%s", "stalled" if has_stalled else "disconnected", request.url.path)

    async def _answer(self, request: Request, method: str) -> Response:
        try:
            check_access(request, *self._tokens)
            if method == "POST":
                check_media_type(request.headers)
            return await self._route.handler(self._service, request)
        except HttpError as error:
            return self._route.errors(error)
        except RollbusError as error:
            return self._route.errors(http_error(error))


async def _no_route(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, HTTPException):
        raise exc
    path, code, message = describe(request.url.path), "http_error", exc.detail
    if exc.status_code == 404:
        known = {path for table in (OPEN, DATA, ADMIN) for _, path in table}
        code, message = (
            "unknown_route",
            f"the path {path} is unknown{nearest(request.url.path, known)}; /docs lists all",
        )
    elif exc.status_code == 405:
        allowed = ", ".join(sorted((exc.headers or {}).get("Allow", "").split(", ")))
        code, message = "wrong_method", f"{request.method} is not allowed for the path {path}; allowed: {allowed}"
    error = HttpError(exc.status_code, message, code=code, headers=exc.headers)
    return _reject(request.app.state.service, request.url.path, error)


def _reject(service: Service, path: str, error: HttpError) -> Response:
    """Count and answer a request that matches no route."""
    with HttpRequestRecord(service.metrics, "any", NO_ROUTE) as seen:
        seen.status = error.status
    return _error_of(path, error)


def _error_of(path: str, error: HttpError) -> Response:
    """Return the answer for an error, in the format of the API that has the path."""
    return (message_error if "/v1/messages/" in f"{path}/" else error_response)(error)


async def _bug(request: Request, _exc: Exception) -> Response:
    # The server logs the traceback. The client learns only that the service failed.
    return _error_of(request.url.path, HttpError(500, "the service has failed", code="internal_error"))
