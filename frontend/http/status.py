"""Routes that describe the service and its fleet: health, models, state, and versions and settings in vLLM's names."""

import platform
import re
import time
from collections.abc import Iterable
from typing import Final, Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__, bus
from ...bus.client.client import watch_fleet
from ...schemas.decoding import JsonObject
from ...schemas.errors import ErrorCode
from ...schemas.presence import WorkerState
from .calls import json_response
from .control.bodies import read_query
from .errors import HttpError, no_workers
from .service import HttpRoute, RouteTable, Service


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that live workers serve, or an adapter of such a model."""

    id: str
    """Name of the model in requests."""
    object: Literal["model"] = "model"
    created: int
    """Unix time at which the model's worker started."""
    owned_by: str = "rollbus"
    root: str
    """The model's folder on its worker's machine; for an adapter, the adapter's name."""
    parent: str | None
    """The model of an adapter; null for a model."""
    max_model_len: int | None
    """Limit on the sum of prompt tokens and generated tokens."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models of all live workers."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]


class Ready(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Readiness of the service."""

    ready: bool = msgspec.field()
    """True if NATS is connected, a worker accepts requests and its model's tokenizer is loaded."""
    problem: str | None = None
    """Why this service receives no presence of workers; absent if it does."""


class FleetAnswer(bus.FleetState, frozen=True, kw_only=True):
    """State of the fleet with totals."""

    ready: bool
    """True if a worker accepts requests."""
    in_flight: int
    """Number of requests that workers have accepted and not ended."""


async def health(_service: Service, _request: Request) -> Response:
    """Return 200 while the service runs. For the state of the fleet, see `/v1/rl/state`."""
    return Response(status_code=200)


async def models(service: Service, _request: Request) -> Response:
    """List the models that live workers serve and their adapters, in OpenAI's format with vLLM's `max_model_len`."""
    return json_response(ModelList(data=tuple(_models(service).values())))


async def model(service: Service, request: Request) -> Response:
    """Return one model that live workers serve, or one of their adapters. Its name may have slashes."""
    name = request.path_params["id"]
    found = _models(service)
    if name not in found and await service.rb.fleet.models_with_adapter(name):
        # The ack of another service may be newer than presence.
        found = _models(service)
    if name not in found:
        allowed = ", ".join(found) or "none, because no worker serves a model"
        raise HttpError(404, f"model {name[:64]!r} is unknown; allowed: {allowed}", code=ErrorCode.UNKNOWN_MODEL)
    return json_response(found[name])


def _models(service: Service) -> dict[str, Model]:
    found: dict[str, Model] = {}
    for worker in service.rb.fleet.workers:
        if worker.capabilities is None:
            continue
        own = Model(
            id=worker.model,
            created=max(int(time.time() - worker.uptime_s), 0),
            root=worker.model_path or worker.model,
            parent=None,
            max_model_len=worker.capabilities.max_model_len,
        )
        found.setdefault(worker.model, own)
        for lora in worker.loras:
            adapter = msgspec.structs.replace(own, id=lora.name, root=lora.name, parent=worker.model)
            found.setdefault(lora.name, adapter)
    return found


async def ready(service: Service, _request: Request) -> Response:
    """Return 200 if NATS is connected and a worker, whose tokenizer is loaded if any, accepts requests; else 503."""
    problem = watch_fleet(service.rb).problem
    serving = next((worker for worker in service.rb.fleet.workers if worker.state is WorkerState.SERVING), None)
    is_ready = problem is None and serving is not None and await service.has_loaded(serving)
    return json_response(Ready(ready=is_ready, problem=problem), 200 if is_ready else 503)


async def state(service: Service, _request: Request) -> Response:
    """Return the presence of all workers, the queues and the desired states."""
    found = await service.rb.fleet.state()
    return json_response(
        FleetAnswer(
            **msgspec.structs.asdict(found),
            ready=any(worker.state is WorkerState.SERVING for worker in found.workers),
            in_flight=sum(worker.in_flight for worker in found.workers),
        )
    )


async def metrics(service: Service, _request: Request) -> Response:
    """Return the metrics of the service and of the fleet in Prometheus's text format."""
    return Response(await service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


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


class InfoQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Format of the settings."""

    config_format: Literal["text", "json"] = "text"
    """`text`: one line for each worker. `json`: one object for each worker."""


async def version(service: Service, _request: Request) -> Response:
    """Return the release of the engines, as vLLM does, and the release of rollbus."""
    known = [worker.capabilities for worker in service.rb.fleet.workers if worker.capabilities is not None]
    if not known:
        raise no_workers("no worker reports the release of its engine")
    engines = sorted({(each.engine, each.engine_version) for each in known})
    named = tuple(" ".join(each) for each in engines)
    return json_response(Version(version=engines[0][1], engines=named, rollbus=__version__))


async def load(service: Service, _request: Request) -> Response:
    """Return the number of open token requests at this service, as vLLM does."""
    return json_response(ServiceLoad(server_load=service.admission.in_flight))


async def server_info(service: Service, request: Request) -> Response:
    """Return the engine settings that each worker announces and the system of this service. The route is vLLM's.

    The settings have vLLM's `parallel_config` if all workers have the same, for one node: this service. `model_config`
    has what all workers return. slime reads these fields at the top, and that engines keep their memory. `vllm_env` is
    empty, because workers do not announce their environment.
    """
    query = read_query(request, InfoQuery)
    config: dict[str, JsonObject] = {
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
    returned: JsonObject = {}
    if known_workers:
        returned = {
            "enable_return_routed_experts": all(each is not None and each.routed_experts for each in known_workers),
            "return_sampling_mask": all(each is not None and each.sampling_mask for each in known_workers),
        }
        config["model_config"] = returned
    system = {"rollbus": __version__, "python": platform.python_version(), "platform": platform.platform()}
    shown = config if query.config_format == "json" else "\n".join(lines)
    top = {**returned, "enable_memory_saver": False}
    return json_response({"vllm_config": shown, "vllm_env": {}, "system_env": system, **top})


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
        "nnodes": 1,
        "node_rank": 0,
    }


async def workers(service: Service, request: Request) -> Response:
    """Return the addresses to which a client sends vLLM's commands: this service, once, for all workers of the fleet.

    Routers of vLLM have this route. Their clients send a command to each address. Workers have no address, and this
    service passes a command to all of them.
    """
    present = service.rb.fleet.workers
    own = {
        "url": str(request.base_url).rstrip("/"),
        "models": sorted({worker.model for worker in present}),
        "workers": sorted(worker.worker for worker in present),
        "is_healthy": any(worker.state is WorkerState.SERVING for worker in present),
        "load": service.admission.in_flight,
    }
    return json_response({"workers": [own], "total": 1})


_READY = HttpRoute(ready, answer={200: Ready, 503: Ready})
_HEALTH = HttpRoute(health, answer=None)
OPEN_ROUTES: RouteTable = {
    ("GET", "/health"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): _HEALTH,
    ("GET", "/ready"): _READY,
    ("GET", "/v1/rl/ready"): _READY,
}
ROUTES: RouteTable = {
    ("GET", "/v1/models"): HttpRoute(models, answer=ModelList),
    ("GET", "/v1/models/{id:path}"): HttpRoute(model, answer=Model),
    ("GET", "/v1/rl/state"): HttpRoute(state, answer=FleetAnswer),
    ("GET", "/metrics"): HttpRoute(metrics, answer="text/plain"),
    ("GET", "/version"): HttpRoute(version, answer=Version),
    ("GET", "/load"): HttpRoute(load, answer=ServiceLoad),
    ("GET", "/workers"): HttpRoute(workers),
    ("GET", "/server_info"): HttpRoute(server_info, query=InfoQuery),
}
