"""Routes that describe the service and its engines under vLLM's names: versions, settings and load."""

import platform
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...schemas.errors import ErrorCode
from ...schemas.presence import WorkerState
from .control.reading import read_query
from .errors import HttpError
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["ABOUT_ROUTES", "parallel_config"]

PARALLEL: Final = re.compile(r"\btp(\d{1,6})-pp(\d{1,6})-dp(\d{1,6})\b")
"""The sizes in the signature of an engine."""


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


class ServedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """An address that accepts the commands of vLLM's routes."""

    url: str
    """URL of this service, by the name that the client uses."""
    models: tuple[str, ...]
    """Models of the fleet."""
    workers: tuple[str, ...]
    """Ids of the workers of the fleet."""
    is_healthy: bool
    """True if a worker accepts requests."""
    load: int
    """Number of open token requests at this service."""


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

    The settings have vLLM's `parallel_config` if all workers have the same. `vllm_env` is empty, because workers do not
    announce their environment.
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
    known_workers = [worker.capabilities for worker in service.rb.fleet.workers]
    parallel = parallel_config(each.signature for each in known_workers if each is not None)
    if parallel is not None:
        config["parallel_config"] = parallel
    system = {"rollbus": __version__, "python": platform.python_version(), "platform": platform.platform()}
    shown = config if query.config_format == "json" else "\n".join(lines)
    return json_response({"vllm_config": shown, "vllm_env": {}, "system_env": system})


def parallel_config(signatures: Iterable[str]) -> dict[str, int] | None:
    """Return the sizes of one engine under vLLM's names; None: engines differ, or do not announce them."""
    found = {sizes and sizes.groups() for sizes in map(PARALLEL.search, signatures)}
    if len(found) != 1 or None in found:
        return None
    tensor, pipeline, data = map(int, found.pop() or ())
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": data,
        "world_size": tensor * pipeline,
        "world_size_across_dp": tensor * pipeline * data,
    }


async def workers(service: Service, request: Request) -> Response:
    """Return the addresses to which a client sends vLLM's commands: this service, once, for all workers of the fleet.

    Routers of vLLM have this route. Their clients send a command to each address. Workers have no address, and this
    service passes a command to all of them.
    """
    present = service.rb.fleet.workers
    own = ServedWorker(
        url=str(request.base_url).rstrip("/"),
        models=tuple(sorted({worker.model for worker in present})),
        workers=tuple(sorted(worker.worker for worker in present)),
        is_healthy=any(worker.state is WorkerState.SERVING for worker in present),
        load=service.admission.in_flight,
    )
    return json_response({"workers": [own], "total": 1})


ABOUT_ROUTES: RouteTable = {
    ("GET", "/version"): HttpRoute(version, answer=Version),
    ("GET", "/load"): HttpRoute(load, answer=ServiceLoad),
    ("GET", "/workers"): HttpRoute(workers),
    ("GET", "/server_info"): HttpRoute(server_info, query=InfoQuery),
}
