"""Routes that describe the service and its engines under vLLM's names: versions, settings and load."""

import platform
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...schemas.errors import ErrorCode
from .control.reading import read_query
from .errors import HttpError
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["ROUTES"]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The releases that are in use."""

    version: str
    """Release of the engines, in the format of vLLM's server. If workers differ, this is the first of `engines`."""
    engines: tuple[str, ...]
    """Engine and release of all workers, without duplicates."""
    rollbus: str
    """Release of rollbus that this service runs."""


class ServiceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current load of this service."""

    server_load: int
    """Number of open token requests at this service, including those that wait."""


class InfoQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Format of the settings."""

    config_format: Literal["text", "json"] = "text"
    """`text`: one line for each worker. `json`: one object for each worker."""


async def version(service: Service, _request: Request) -> Response:
    """Return the release of the engines, as vLLM does, and the release of rollbus."""
    known = [worker.capabilities for worker in service.rb.fleet.workers if worker.capabilities is not None]
    if not known:
        raise HttpError(503, "no worker reports the release of its engine", code=ErrorCode.NO_WORKERS)
    engines = sorted({(each.engine, each.engine_version) for each in known})
    named = tuple(" ".join(each) for each in engines)
    return json_response(Version(version=engines[0][1], engines=named, rollbus=__version__))


async def load(service: Service, _request: Request) -> Response:
    """Return the number of open token requests at this service, as vLLM does."""
    return json_response(ServiceLoad(server_load=service.admission.in_flight))


async def server_info(service: Service, request: Request) -> Response:
    """Return the engine settings that each worker announces and the system of this service. The route is vLLM's.

    `vllm_env` is empty, because workers do not announce their environment.
    """
    query = read_query(request, InfoQuery)
    config: dict[str, dict[str, Any]] = {
        worker.worker: {"model": worker.model, "model_path": worker.model_path, **msgspec.to_builtins(known)}
        for worker in service.rb.fleet.workers
        if (known := worker.capabilities) is not None
    }
    lines = [
        f"{worker}: " + ", ".join(f"{name}={value!r}" for name, value in fields.items())
        for worker, fields in config.items()
    ]
    system = {"rollbus": __version__, "python": platform.python_version(), "platform": platform.platform()}
    shown = config if query.config_format == "json" else "\n".join(lines)
    return json_response({"vllm_config": shown, "vllm_env": {}, "system_env": system})


ROUTES: RouteTable = {
    ("GET", "/version"): HttpRoute(version, answer=Version),
    ("GET", "/load"): HttpRoute(load, answer=ServiceLoad),
    ("GET", "/server_info"): HttpRoute(server_info, query=InfoQuery),
}
