"""The service's span of an HTTP request. All other spans of the request are below it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from ...bus.tracing import names
from ...bus.tracing.spans import Attribute, Clock, Span, SpanContext, Tracer
from .metrics import HttpRequestRecord
from .trace import GivenTrace, given_trace

__all__ = ["server_span"]


@contextmanager
def server_span(
    tracer: Tracer | None, request: Request, route: str, seen: HttpRequestRecord, *, is_trusted: bool
) -> Iterator[None]:
    """Set `request.state.trace`, which the request forwards, and trace the request until its answer is sent.

    Requests that only read have no span, because they are frequent and reach no worker.

    Args:
        tracer: None if tracing is off. The client's trace is then forwarded.
        seen: has the status of the answer, as soon as there is one.
        is_trusted: the client may have its request sampled, and its own trace continues. Otherwise a new trace begins
            here, with a link to the client's trace. An untrusted client could choose ids that are always sampled.
    """
    request.state.trace = given = None
    if request.method == "POST":
        request.state.trace = given = given_trace(request.headers, is_trusted=is_trusted)
    if tracer is None or request.method != "POST":
        yield
        return
    caller = None if given is None else SpanContext.parse(given.traceparent, given.tracestate)
    parent, links = (caller, ()) if is_trusted or caller is None else (None, (caller,))
    name, clock, began_at = f"{request.method} {route}", Clock(), time.monotonic()
    context = tracer.start(name, "server", parent, links)
    request.state.trace = GivenTrace(context.traceparent, context.tracestate)
    try:
        yield
    finally:
        if context.is_sampled:
            attributes: dict[str, Attribute] = {
                names.HTTP_METHOD: request.method,
                names.HTTP_ROUTE: route,
                names.HTTP_STATUS: seen.status,
                names.URL_PATH: request.url.path,
                names.URL_SCHEME: request.url.scheme,
            }
            error = str(seen.status) if seen.status >= 500 else None
            if error is not None:
                attributes[names.ERROR_TYPE] = error
            span = Span(
                name=name,
                kind="server",
                context=context,
                parent=parent,
                start_ns=clock.unix_ns(began_at),
                end_ns=clock.unix_ns(time.monotonic()),
                attributes=attributes,
                links=links,
                error=error,
            )
            tracer.export([span])
