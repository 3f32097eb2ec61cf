"""`/v1/loras`: LoRA adapters, with the routes of Dynamo's workers."""

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....schemas.errors import ControlCode
from ..errors import HttpError, invalid
from ..service import Service
from ..status import json_response
from . import bodies
from .answers import LORA_OF_PRIME
from .commands import CommandCall, is_loaded, load_lora, unload_lora
from .reading import read_query
from .reads import SETTLE_S, FleetQuery, fleet_state, stale_field

__all__ = ["add_lora", "list_loras", "remove_lora"]

FILE: Final = "file://"
OBJECTS: Final = "objects:"


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter."""

    name: str
    """Name of the adapter in requests."""
    model: str
    """Name of the model that the adapter belongs to."""
    workers: dict[str, int]
    """Version of the adapter on each worker, by worker id."""


async def list_loras(service: Service, request: Request) -> Response:
    """List the adapters that live workers have loaded, with newest version and workers, in Dynamo's format."""
    model = read_query(request, FleetQuery).model
    found: dict[tuple[str, str], dict[str, int]] = {}
    state = await fleet_state(service, model, SETTLE_S)
    for worker in state.workers:
        for lora in worker.loras:
            found.setdefault((lora.name, worker.model), {})[worker.worker] = lora.version
    adapters = [Adapter(name=name, model=model, workers=workers) for (name, model), workers in sorted(found.items())]
    answer: dict[str, Any] = {
        "status": "success",
        "loras": {adapter.name: max(adapter.workers.values()) for adapter in adapters},
        "count": len(adapters),
        "adapters": adapters,
        **stale_field(state),
    }
    return json_response(answer)


async def add_lora(call: CommandCall[bodies.AddLoraBody]) -> Response:
    """Load a LoRA adapter into all workers of a model, or replace the one with that name, as Dynamo's route does."""
    fields = call.fields
    path, objects = _place(fields.source.uri)
    same = {name: getattr(fields, name) for name in bodies.SendBody.__struct_fields__}
    given = bodies.LoadLoraBody(
        name=fields.lora_name, path=path, objects=objects, load_inplace=fields.load_inplace, **same
    )
    extra = {"status": "success", "message": f"adapter {fields.lora_name} is loaded", "lora_name": fields.lora_name}
    names = {"source": "source.uri", "name": "lora_name"}
    asked = CommandCall(call.service, call.request, given, call.style)
    return await load_lora(asked, extra=extra, names=names)


def _place(uri: str) -> tuple[str | None, str | None]:
    """Return the folder and the place in the object store that a URI names. One of the two is None.

    Raises:
        HttpError: 400, the URI names neither.
    """
    if uri.startswith(OBJECTS):
        return None, uri.removeprefix(OBJECTS)
    path = uri.removeprefix(FILE)
    if path.startswith("/"):
        return path, None
    raise invalid("source.uri", f"is {uri[:64]!r}", "file:///FOLDER on the workers' machines, or objects:BUCKET/PREFIX")


async def remove_lora(service: Service, request: Request) -> Response:
    """Unload a LoRA adapter, as Dynamo's route does. Answer 404 if no worker has it and no worker should have it."""
    name = request.path_params["name"]
    sent = read_query(request, bodies.SendBody)
    if not await is_loaded(service.rb.fleet, name, sent.model):
        raise HttpError(404, f"adapter {name[:64]!r} is not loaded", code=ControlCode.NOT_FOUND, param="name")
    same = {field: getattr(sent, field) for field in bodies.SendBody.__struct_fields__}
    call = CommandCall(service, request, bodies.UnloadLoraBody(name=name, **same), LORA_OF_PRIME)
    return await unload_lora(
        call, extra={"status": "success", "message": f"adapter {name} is unloaded", "lora_name": name}
    )
