"""Control routes: rollbus's own below `/v1/rl/`, and the same commands under the route names of vLLM and prime-rl.

Routes that change the fleet need the admin token. Routes that only read also accept the data token. A command is
recorded before the workers receive it, so the workers execute it even if its client disconnects.

Known routes that this service does not serve answer 501 and name the alternative. They do not answer 404: for example,
prime-rl treats 404 as a server that does not need the route.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, get_args

from starlette.requests import Request
from starlette.responses import Response

from ..errors import HttpError
from ..service import HttpRoute, RouteTable, Service
from . import areal, bodies, commands, reads
from .answers import LOAD_LORA_OF_VLLM, LORA_OF_PRIME, RL, UNLOAD_LORA_OF_VLLM, VLLM, ResponseStyle
from .bodies import read_fields
from .commands import CommandCall

Command = Callable[[CommandCall[Any]], Awaitable[Response]]
_COMMANDS: Final[dict[str, tuple[Command, ResponseStyle]]] = {
    "/v1/rl/pause": (commands.pause, RL),
    "/v1/rl/resume": (commands.resume, RL),
    "/v1/rl/drain": (commands.drain, RL),
    "/v1/rl/lend": (commands.lend, RL),
    "/v1/rl/return": (commands.return_worker, RL),
    "/v1/rl/flush_cache": (commands.flush_cache, RL),
    "/v1/rl/update_weights": (commands.update_weights, RL),
    "/v1/rl/load_lora_adapter": (commands.load_lora, RL),
    "/v1/rl/unload_lora_adapter": (commands.unload_lora, RL),
    "/v1/rl/cancel_weight_update": (commands.cancel_weight_update, RL),
    "/v1/rl/abort": (commands.abort, RL),
    "/v1/rl/abort_requests": (commands.abort, VLLM),
    "/pause": (commands.pause, VLLM),
    "/resume": (commands.resume, VLLM),
    "/abort_requests": (commands.abort, VLLM),
    "/sleep": (commands.sleep, VLLM),
    "/wake_up": (commands.wake, VLLM),
    "/reset_prefix_cache": (commands.flush_cache, VLLM),
    "/update_weights": (commands.update_weights, VLLM),
    "/load_lora_adapter": (commands.load_lora, LORA_OF_PRIME),
    "/unload_lora_adapter": (commands.unload_lora, VLLM),
    "/v1/load_lora_adapter": (commands.load_lora, LOAD_LORA_OF_VLLM),
    "/v1/unload_lora_adapter": (commands.unload_lora, UNLOAD_LORA_OF_VLLM),
    "/v1/loras": (commands.add_lora, LORA_OF_PRIME),
    "/init_weight_transfer_engine": (commands.init_weight_transfer, VLLM),
    "/start_weight_update": (commands.start_weight_update, VLLM),
    "/finish_weight_update": (commands.finish_weight_update, VLLM),
    "/areal_pause_generation": (areal.pause, VLLM),
    "/areal_continue_generation": (areal.resume, VLLM),
    "/areal_update_weights": (areal.update_weights, VLLM),
}
"""By path, all of them `POST`: the function that executes the command, and the style of the answer."""


def command_route(command: Command, style: ResponseStyle) -> HttpRoute:
    """Return the route of a command, with its fields in the body or in the query.

    Args:
        command: the type of its `call` states the struct of the fields.
    """
    (body,) = get_args(command.__annotations__["call"])

    async def handle(service: Service, request: Request) -> Response:
        fields = await read_fields(service, request, body)
        return await command(await commands.read_key(CommandCall(service, request, fields, style)))

    # The OpenAPI document uses it as the summary of the route.
    handle.__doc__ = command.__doc__
    answer: object = Any
    if style.text is not None:
        answer = "text/plain"
    elif command is commands.pause:
        answer = {200: Any, 202: Any, 207: Any}
    elif style is RL:
        answer = {200: Any, 207: Any}
    return HttpRoute(handle, body, answer, body)


_NO_XCCL: Final = (
    "AReaL's broadcasts need its code inside the engines; set its weight_update_mode to disk, so that it uses"
    " /areal_update_weights"
)
_NO_MEDIA: Final = "this service accepts no images, audio or video; use /reset_prefix_cache"
INSTEAD: Final = {
    "/init_broadcaster": (
        "prime-rl's broadcasts over NCCL and NIXL need prime-rl's code inside the engines; use its broadcast through"
        " the filesystem (/update_weights with weight_dir), or vLLM's transfer (/init_weight_transfer_engine)"
    ),
    "/reload_weights": "use /v1/rl/update_weights with the path of the first checkpoint and allow_rollback",
    "/start_draft_weight_update": "use /update_weights: this service has no draft models with separate weights",
    "/release_kv_cache_memory": "use /sleep, which frees the KV cache and all other memory of the engine",
    "/shutdown_weight_transfer_engine": (
        "engines stay in the group of /init_weight_transfer_engine until they exit; restart the workers to leave it"
    ),
    "/weight_checker": "use /v1/rl/state: each worker verifies its weights against the files and with a canary",
    "/v1/embeddings": "no model of the fleet embeds, classifies or ranks; /v1/models lists the models that generate",
    "/reset_mm_cache": _NO_MEDIA,
    "/reset_encoder_cache": _NO_MEDIA,
    "/areal_init_weights_update_group": _NO_XCCL,
    "/areal_set_update_weight_meta": _NO_XCCL,
    "/areal_set_update_weight_meta_lora": _NO_XCCL,
    "/areal_update_weights_xccl": _NO_XCCL,
    "/areal_update_weights_lora_xccl": _NO_XCCL,
}
"""The alternative to each route, by path, all of them `POST`."""


def _refusal(path: str, instead: str) -> HttpRoute:
    async def refuse(_service: Service, _request: Request) -> Response:
        raise HttpError(501, f"POST {path} is not served: {instead}", code="not_served")

    refuse.__doc__ = f"Not served: {instead}."
    return HttpRoute(refuse, answer={})


_ALL: Final[RouteTable] = {("POST", path): _refusal(path, instead) for path, instead in INSTEAD.items()}
DATA_ROUTES: Final[RouteTable] = {key: route for key, route in _ALL.items() if key[1].startswith("/v1/")}
"""Routes of OpenAI, whose clients have the data token."""
NOT_SERVED_ROUTES: Final[RouteTable] = {key: route for key, route in _ALL.items() if key not in DATA_ROUTES}
"""Routes that would change the fleet."""

_WEIGHT_INFO: Final = HttpRoute(reads.weight_info, query=reads.FleetQuery)
ADMIN_ROUTES: Final[RouteTable] = {
    **{("POST", path): command_route(*command) for path, command in _COMMANDS.items()},
    ("DELETE", "/v1/loras/{name:path}"): HttpRoute(commands.remove_lora, query=bodies.SendBody),
    **NOT_SERVED_ROUTES,
}
"""Routes that change the fleet, or that would change it if the service supported them."""
ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/operations/{id}"): HttpRoute(reads.operation),
    ("GET", "/v1/rl/health"): HttpRoute(reads.rl_health, query=reads.FleetQuery),
    ("GET", "/v1/rl/weight_version"): HttpRoute(reads.weight_version, query=reads.FleetQuery),
    ("GET", "/is_paused"): HttpRoute(reads.is_paused, query=reads.FleetQuery),
    ("GET", "/is_sleeping"): HttpRoute(reads.is_sleeping, query=reads.FleetQuery),
    ("GET", "/weight_info"): _WEIGHT_INFO,
    ("GET", "/v1/rl/weight_info"): _WEIGHT_INFO,
    ("GET", "/get_world_size"): HttpRoute(reads.get_world_size, query=reads.WorldQuery),
    ("GET", "/v1/loras"): HttpRoute(commands.list_loras, query=reads.FleetQuery),
    ("GET", "/liveness"): HttpRoute(reads.liveness, query=reads.FleetQuery),
    **DATA_ROUTES,
}
"""Routes that only read the state of the fleet, or that the service does not serve to users."""
