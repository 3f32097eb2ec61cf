"""Routes that vime expects of a vLLM server and of vLLM's router: it needs no adapter.

Source: vllm-project/vime, commit 2b83ea209634051243693e8186f45f449acb4cd1: `vime/backends/vllm_utils/vllm_engine.py`.
With `--update-weight-transport disk`, it writes a checkpoint, calls `reload_weights` on each engine, and sets the
version.
"""

import re
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....bus.protocol.fleet.desired import version_label
from ....schemas.decoding import JsonObject
from ....schemas.errors import ControlCode
from ....schemas.limits import MAX_WEIGHT_VERSION
from ....schemas.limits import NonEmptyName as Name
from ..body import decode_body, read_body
from ..calls import json_response
from ..control import command_route
from ..control.answers import VLLM
from ..control.bodies import Fields, Path, SendBody, read_fields
from ..control.commands import CommandCall, with_version
from ..control.reads import fleet_state
from ..errors import HttpError, invalid
from ..service import HttpRoute, RouteTable, Service

RPC: Final = "/collective_rpc"
RELOAD: Final = "reload_weights"
COMMANDS: Final = "clients cannot call methods of the engines; use the commands, for example /v1/rl/update_weights"
WITH_WEIGHTS: Final = (
    "a version changes only together with its weights; use `weight_version` of /finish_weight_update, or `version`"
    " of /v1/rl/update_weights"
)
FOLDER: Final = re.compile(r"weight_v(?P<number>[0-9]{1,18})")
"""Name of the folder of a version, for example `weight_v000012`."""


class RegisterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that joins a router."""

    url: Path
    """Address of the engine: only that of this service, under which all workers answer."""
    worker_type: Name = "regular"
    """Only `regular`: the fleet knows its own prefill and decode workers."""


class RpcBody(SendBody, frozen=True, kw_only=True):
    """A call of a method of the engines."""

    method: Name | None = None
    """Only `reload_weights`."""
    args: tuple[Any, ...] = ()
    """Only empty."""
    kwargs: JsonObject = msgspec.field(default_factory=dict)
    """`weights_path`, and `is_checkpoint_format`, which must be true."""
    timeout: float | None = None
    """vLLM's name for `timeout_s`, which has no effect here."""


class VersionBody(SendBody, frozen=True, kw_only=True):
    """The version that the client gives its last update."""

    new_version: Name
    """Text or number of the version."""


async def register(service: Service, request: Request) -> Response:
    """Answer 200 if an engine that joins is this service, as vLLM's routers do. The list of workers does not change."""
    body = decode_body(await read_body(request, service.settings), RegisterBody)
    own = str(request.base_url).rstrip("/")
    if body.url.rstrip("/") != own:
        raise invalid("url", f"is {body.url[:64]!r}", f"{own}: workers join the fleet by themselves, over NATS")
    if body.worker_type != "regular":
        raise invalid("worker_type", f"is {body.worker_type!r}", "regular")
    return json_response({"status": "registered", "url": own})


async def reload(call: CommandCall[Fields], path: str, field: str, extra: JsonObject) -> Response:
    """Replace the weights by the folder of a version, and answer with its result.

    The number in the folder's name is the version, if it is above the fleet's. A run that starts again counts from 1:
    its number is then the label of the fleet's next version.

    Args:
        field: name of the field that has the path.
        extra: additional fields of the answer.
    """
    model = call.fields.model
    state = await fleet_state(call.service, model)
    present = max(worker.served_version for worker in state.workers)
    named = FOLDER.fullmatch(path.rstrip("/").rpartition("/")[2])
    number = int(named["number"]) if named else None
    is_next = number is None or not present < number <= MAX_WEIGHT_VERSION
    label = str(number) if number is not None and is_next else None

    async def update(version: int) -> bus.CommandResult:
        return await call.fleet.update_weights(path, version=version, label=label, **call.options)

    work = with_version(call.service, update, call.recorded_version if is_next else number, model)
    return await call.answer(work, "update_weights", extra, {"source": field})


async def collective_rpc(call: CommandCall[RpcBody]) -> Response:
    """Replace the weights if the method is `reload_weights` with a folder. Other methods of engines are not served."""
    fields = call.fields
    if fields.args:
        raise invalid("args", "are given", "none: use kwargs")
    if fields.method is None:
        raise invalid("method", "is missing", RELOAD)
    if fields.method != RELOAD:
        raise HttpError(501, f"{fields.method[:64]!r} is not served: {COMMANDS}", code="not_served")
    given = dict(fields.kwargs)
    path = given.pop("weights_path", None)
    if not isinstance(path, str) or not 1 <= len(path) <= 4096:
        raise invalid("kwargs.weights_path", f"is {str(path)[:64]!r}", "a folder on the workers' machines")
    if given.pop("is_checkpoint_format", True) is not True:
        raise invalid("kwargs.is_checkpoint_format", "is not true", "true: the folder has a checkpoint")
    for name in given:
        raise invalid(f"kwargs.{name}"[:80], "is given", "weights_path and is_checkpoint_format")
    return await reload(call, path, "kwargs.weights_path", {"results": [None]})


async def check_version(service: Service, request: Request) -> Response:
    """Answer 200 if all workers that may serve have this version or label, as after an update. Nothing changes."""
    body = await read_fields(service, request, VersionBody)
    state = await fleet_state(service, body.model)
    found = {
        version_label(state.desired.get(worker.model), worker.worker, worker.served_version)
        or str(worker.served_version)
        for worker in state.workers
    }
    if found != {body.new_version}:
        problem = f"the weights have version {', '.join(sorted(found)) or 'none'}, not {body.new_version!r}"
        raise HttpError(409, f"{problem}: {WITH_WEIGHTS}", code=ControlCode.OLD_VERSION)
    return json_response({"status": "ok", "weight_version": body.new_version})


ROUTES: Final[RouteTable] = {("POST", "/workers"): HttpRoute(register, RegisterBody)}
ADMIN_ROUTES: Final[RouteTable] = {
    ("POST", RPC): command_route(collective_rpc, VLLM),
    ("POST", "/update_weight_version"): HttpRoute(check_version, VersionBody, query=VersionBody),
}
"""Routes that change the fleet."""
