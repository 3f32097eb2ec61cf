"""Switches tracing on: with True and the standard environment variables, or with a provider of the caller."""

from typing import TYPE_CHECKING

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.install import pip_install
from .spans import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    Tracing = bool | TracerProvider
else:
    Tracing = object

__all__ = ["Tracing", "check_tracing", "make_tracer"]


def check_tracing(tracing: Tracing, field: str = "tracing") -> Tracing:
    """Validate a value for `make_tracer`. OpenTelemetry is imported only if tracing is requested.

    Raises:
        InvalidRequest: OpenTelemetry is not installed, or `tracing` is neither a bool nor a provider.
    """
    if tracing is False:
        return tracing
    try:
        from . import otel
    except ImportError as exc:
        problem = f"needs {exc.name}, which is not installed"
        raise InvalidRequest(field=field, problem=problem, allowed=f"False, or {pip_install('otel')}") from exc
    if tracing is not True and not otel.is_provider(tracing):
        allowed = "True, False or a TracerProvider of opentelemetry.sdk.trace"
        raise InvalidRequest(field=field, problem=f"is {describe(tracing)}", allowed=allowed)
    return tracing


def make_tracer(tracing: Tracing, *, service_name: str, field: str = "tracing") -> Tracer | None:
    """Start a tracer, which the caller closes; None: tracing is off, also by `OTEL_SDK_DISABLED`.

    Args:
        tracing: False: off. True: an exporter by OTLP over HTTP, set up by the environment (`OTEL_*`). Else a
            `TracerProvider` of OpenTelemetry's SDK, which is used unchanged, and neither flushed nor shut down.
        service_name: the name if the environment sets none.
        field: the caller's name for `tracing`, for errors.
    """
    if check_tracing(tracing, field) is False:
        return None
    from . import otel

    if otel.is_provider(tracing):
        return otel.tracer_of(tracing)
    try:
        return otel.exporting_tracer(service_name)
    except ValueError as exc:
        raise InvalidRequest(field=field, problem=f"cannot be set up: {exc}", allowed="valid OTEL_* variables") from exc
