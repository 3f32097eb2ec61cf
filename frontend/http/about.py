"""What a service says of itself and of its engines under vLLM's names: versions, settings, load."""

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
    """The releases that run."""

    version: str
    """Of the engines, as vLLM's server says its own; where workers differ, the first of `engines`."""
    engines: tuple[str, ...]
    """Of all workers: the engine and its release."""
    rollbus: str
    """Of this service."""


class ServiceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How much this service has to do."""

    server_load: int
    """Requests for tokens that are under way here, those that wait included."""


class InfoQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the settings are written."""

    config_format: Literal["text", "json"] = "text"
    """`text`: a line for each worker; `json`: an object for each."""


async def version(service: Service, _request: Request) -> Response:
    """vLLM's: the release of the engines; and that of rollbus."""
    known = [worker.capabilities for worker in service.rb.fleet.workers if worker.capabilities is not None]
    if not known:
        raise HttpError(503, "no workers are there whose engine has a release", code=ErrorCode.NO_WORKERS)
    engines = sorted({(each.engine, each.engine_version) for each in known})
    named = tuple(" ".join(each) for each in engines)
    return json_response(Version(version=engines[0][1], engines=named, rollbus=__version__))


async def load(service: Service, _request: Request) -> Response:
    """vLLM's: requests for tokens that are under way at this service."""
    return json_response(ServiceLoad(server_load=service.admission.in_flight))


async def server_info(service: Service, request: Request) -> Response:
    """vLLM's: what workers announce of their engines, by worker, and where this service runs.

    `vllm_env` is empty: workers do not announce their environment.
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
