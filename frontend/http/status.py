"""What can be asked without changing anything: is the service alive, which models, in what state is the fleet."""

import time
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.service import RouteTable, Service
from schemas.presence import WorkerPresence, WorkerState

__all__ = ["OPEN_ROUTES", "ROUTES", "json_response"]


def json_response(value: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def health(_service: Service, _request: Request) -> Response:
    """The service lives; whether the fleet can serve is said by `/v1/rl/state`."""
    return Response(status_code=200)


async def models(service: Service, _request: Request) -> Response:
    """The models that live workers serve, and their adapters, in OpenAI's shape with vLLM's `max_model_len`."""
    found: dict[str, dict[str, Any]] = {}
    for worker in service.workers():
        if worker.capabilities is None:
            continue
        found.setdefault(
            worker.model, _model(worker.model, worker, root=worker.model_path or worker.model, parent=None)
        )
        for lora in worker.loras:
            found.setdefault(lora.name, _model(lora.name, worker, root=lora.name, parent=worker.model))
    return json_response({"object": "list", "data": list(found.values())})


def _model(name: str, worker: WorkerPresence, *, root: str, parent: str | None) -> dict[str, Any]:
    capabilities = worker.capabilities
    return {
        "id": name,
        "object": "model",
        "created": int(time.time() - worker.uptime_s),
        "owned_by": "rollbus",
        "root": root,
        "parent": parent,
        "max_model_len": None if capabilities is None else capabilities.max_model_len,
    }


async def ready(service: Service, _request: Request) -> Response:
    """200 if some worker takes requests, 503 if none does."""
    is_ready = any(worker.state is WorkerState.SERVING for worker in service.workers())
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def state(service: Service, _request: Request) -> Response:
    """All that workers say of themselves, what waits for them, and what they should be doing."""
    found = await service.rb.fleet.state()
    return json_response(
        {
            "fleet": found.fleet,
            "ready": any(worker.state is WorkerState.SERVING for worker in found.workers),
            "in_flight": sum(worker.in_flight for worker in found.workers),
            "workers": found.workers,
            "queues": found.queues,
            "desired": found.desired,
        }
    )


async def metrics(service: Service, _request: Request) -> Response:
    """What the service counted, and the fleet as it stands, in Prometheus's text format."""
    return Response(await service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


OPEN_ROUTES: RouteTable = {("GET", "/health"): health, ("GET", "/ready"): ready, ("GET", "/v1/rl/ready"): ready}
ROUTES: RouteTable = {("GET", "/v1/models"): models, ("GET", "/v1/rl/state"): state, ("GET", "/metrics"): metrics}
