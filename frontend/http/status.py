"""Routes that only read: health of the service, the served models, and the state of the fleet."""

import time
from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...schemas.errors import ErrorCode
from ...schemas.presence import WorkerPresence, WorkerState
from .errors import HttpError
from .service import HttpRoute, RouteTable, Service

__all__ = ["OPEN_ROUTES", "ROUTES", "json_response"]


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


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness of the service."""

    ready: bool
    """True if a worker accepts requests and its model's tokenizer is loaded."""


class FleetAnswer(bus.FleetState, frozen=True, kw_only=True):
    """State of the fleet with totals."""

    ready: bool
    """True if a worker accepts requests."""
    in_flight: int
    """Number of requests that workers have accepted and not ended."""


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


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
        found.setdefault(worker.model, _model(worker.model, worker, worker.model_path or worker.model, None))
        for lora in worker.loras:
            found.setdefault(lora.name, _model(lora.name, worker, lora.name, worker.model))
    return found


def _model(name: str, worker: WorkerPresence, root: str, parent: str | None) -> Model:
    return Model(
        id=name,
        created=int(time.time() - worker.uptime_s),
        root=root,
        parent=parent,
        max_model_len=None if worker.capabilities is None else worker.capabilities.max_model_len,
    )


async def ready(service: Service, _request: Request) -> Response:
    """Return 200 if a worker accepts requests and its model's tokenizer, if any, is loaded. Otherwise return 503."""
    serving = next((worker for worker in service.rb.fleet.workers if worker.state is WorkerState.SERVING), None)
    is_ready = serving is not None and await service.has_loaded(serving)
    return json_response(Ready(ready=is_ready), 200 if is_ready else 503)


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
}
