"""Routes of the inference servers of SkyRL 0.4, for its `RemoteInferenceClient`.

`POST /skyrl/v1/generate` is `POST /inference/v1/generate` with routed experts in the form that this client checks: the
smallest of uint8, int16 and int32 for the largest id of the array, and never null. The client reads the results of
commands only from answers with a `Content-Length`, which all answers to commands have.
"""

import dataclasses
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....schemas.decoding import JsonObject
from ....schemas.limits import NonEmptyName as Name
from ....schemas.limits import Version
from ..body import decode_body, read_body
from ..calls import json_response
from ..control import command_route
from ..control.answers import LORA_OF_PRIME, VLLM
from ..control.bodies import LoadLoraBody, Path, SendBody, read_query
from ..control.commands import CommandCall, load_lora, parse_place
from ..errors import invalid, unsupported
from ..generate import WITH_ROWS, GenerateBody, SamplingBody, prepare_generate
from ..service import HttpRoute, RouteTable, Service
from ..tokens import smallest_rows_json
from ..writer import AnswerWriter, respond


class SkyrlBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Token ids to continue, with the routed experts of all positions."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    """Token ids of the prompt."""
    sampling_params: SamplingBody
    """Sampling parameters."""
    model: str | None = None
    """Name of a model or adapter. None: the fleet's only model."""
    cache_salt: str | None = None
    """Requests share prefix-cache entries only with requests of the same salt."""
    return_sample_support: bool | None = None
    """Rejected if true: the service does not return the ids from which each token was sampled in SkyRL's form."""
    features: JsonObject | None = None
    """Rejected: inputs other than tokens."""


async def generate(service: Service, request: Request) -> Response:
    """Continue token ids and return the routed experts of all positions, as SkyRL's servers do."""
    service.admit(request)
    given = decode_body(await read_body(request, service.settings), SkyrlBody)
    body = GenerateBody(
        token_ids=given.token_ids,
        sampling_params=given.sampling_params,
        model=given.model,
        cache_salt=given.cache_salt,
        features=given.features,
    )
    prepare = partial(_prepare, service, request, body, with_support=bool(given.return_sample_support))
    return await respond(service, request, body, WITH_ROWS, prepare)


async def _prepare(service: Service, request: Request, body: GenerateBody, *, with_support: bool) -> AnswerWriter:
    if with_support:
        raise unsupported("return_sample_support", "the service returns no sample support", allowed="false")
    writer = await prepare_generate(service, request, body)
    if writer.target.capabilities.routed_experts is None:
        problem = f"is {writer.target.name!r}, which returns no routed experts"
        raise invalid("model", problem, "a model with experts; without them, use /inference/v1/generate")
    options = dataclasses.replace(writer.options, as_json=smallest_rows_json)
    return dataclasses.replace(writer, shape=WITH_ROWS, options=options)


class SessionQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The session that ends."""

    session_id: Name
    """The value of `X-Session-ID` in its requests."""


async def finish_session(_service: Service, request: Request) -> Response:
    """Answer 200 at the end of a session. A session reserves no slots of a worker, so there is nothing to release."""
    read_query(request, SessionQuery)
    return json_response({"status": "ok", "released": 0})


class FetchBody(SendBody, frozen=True, kw_only=True):
    """Replace the weights by a published checkpoint: all workers load, verify and serve it, or the route fails."""

    target_version: Version
    """Version of the new weights."""
    uri: Path | None = None
    """`file:///DIR` or `/DIR` on the workers' machines, or `objects:<bucket>/<prefix>`: a whole checkpoint. It has
    precedence over `sync_dir`."""
    sync_dir: Path | None = None
    """The checkpoint is in the subdirectory `delta-00000007` of this directory, for version 7, as SkyRL names it."""


async def fetch_weights(call: CommandCall[FetchBody]) -> Response:
    """Update the weights of all workers of a model to a published checkpoint, as with `/update_weights`."""
    fields = call.fields
    uri, name = fields.uri, "uri"
    if uri is None:
        if fields.sync_dir is None:
            raise invalid("uri", "is missing", "uri or sync_dir")
        uri, name = f"{fields.sync_dir.rstrip('/')}/delta-{fields.target_version:08d}", "sync_dir"
    path, objects = parse_place(uri, name)
    work = call.fleet.update_weights(path, version=fields.target_version, objects=objects, **call.options)
    extra = {"status": "ok", "target_version": fields.target_version}
    return await call.answer(work, "update_weights", extra, {"source": name, "version": "target_version"})


class SkyrlLoraBody(SendBody, frozen=True, kw_only=True):
    """Load a LoRA adapter, or replace the adapter with the same name."""

    lora_name: Name
    """Name of the adapter in requests."""
    lora_path: Path | None = None
    """Directory on the workers' machines, below one of their weight roots."""
    in_memory: bool = False
    """Only false is allowed: SkyRL's own engines take adapters from memory."""


async def load_adapter(call: CommandCall[SkyrlLoraBody]) -> Response:
    """Load a LoRA adapter into all workers of a model, or replace the one with that name, as SkyRL's servers do."""
    fields = call.fields
    if fields.in_memory:
        raise unsupported("in_memory", "workers load adapters from directories", allowed="false, with lora_path")
    asked = call.with_fields(LoadLoraBody, lora_name=fields.lora_name, lora_path=fields.lora_path)
    return await load_lora(asked, extra={"status": "ok", "lora_name": fields.lora_name})


ROUTES: Final[RouteTable] = {
    ("POST", "/skyrl/v1/generate"): HttpRoute(generate, SkyrlBody),
    ("POST", "/finish_session"): HttpRoute(finish_session, query=SessionQuery),
}
ADMIN_ROUTES: Final[RouteTable] = {
    ("POST", "/fetch_weights"): command_route(fetch_weights, VLLM),
    ("POST", "/skyrl/v1/load_lora_adapter"): command_route(load_adapter, LORA_OF_PRIME),
}
"""Routes that change the fleet."""
