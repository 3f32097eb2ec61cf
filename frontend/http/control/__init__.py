"""Control routes: rollbus's own below `/v1/rl/`, and the same commands under the route names of vLLM and prime-rl.

Routes that change the fleet need the admin token. Routes that only read also accept the data token. A command is
recorded before the workers receive it, so the workers execute it even if its client disconnects.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ..service import HttpRoute, RouteTable, Service
from . import bodies, commands, loras, not_served, operations, ranks, reads
from .answers import LOAD_LORA_OF_VLLM, LORA_OF_PRIME, RL, UNLOAD_LORA_OF_VLLM, VLLM, ResponseStyle
from .commands import CommandCall
from .reading import read_fields

__all__ = ["NOT_SERVED_ROUTES", "ROUTES"]

Command = Callable[[CommandCall[Any]], Awaitable[Response]]
_COMMANDS: Final[dict[str, tuple[Command, type[bodies.SendBody], ResponseStyle]]] = {
    "/v1/rl/pause": (commands.pause, bodies.PauseBody, RL),
    "/v1/rl/resume": (commands.resume, bodies.ResumeBody, RL),
    "/v1/rl/drain": (commands.drain, bodies.DrainBody, RL),
    "/v1/rl/flush_cache": (commands.flush_cache, bodies.FlushBody, RL),
    "/v1/rl/update_weights": (commands.update_weights, bodies.UpdateBody, RL),
    "/v1/rl/load_lora_adapter": (commands.load_lora, bodies.LoadLoraBody, RL),
    "/v1/rl/unload_lora_adapter": (commands.unload_lora, bodies.UnloadLoraBody, RL),
    "/v1/rl/cancel_weight_update": (commands.cancel_weight_update, bodies.CancelTransferBody, RL),
    "/v1/rl/abort": (commands.abort, bodies.AbortBody, RL),
    "/v1/rl/abort_requests": (commands.abort, bodies.AbortBody, VLLM),
    "/pause": (commands.pause, bodies.PauseBody, VLLM),
    "/resume": (commands.resume, bodies.ResumeBody, VLLM),
    "/abort_requests": (commands.abort, bodies.AbortBody, VLLM),
    "/sleep": (commands.sleep, bodies.SleepBody, VLLM),
    "/wake_up": (commands.wake, bodies.WakeBody, VLLM),
    "/reset_prefix_cache": (commands.flush_cache, bodies.FlushBody, VLLM),
    "/update_weights": (commands.update_weights, bodies.UpdateBody, VLLM),
    "/load_lora_adapter": (commands.load_lora, bodies.LoadLoraBody, LORA_OF_PRIME),
    "/unload_lora_adapter": (commands.unload_lora, bodies.UnloadLoraBody, VLLM),
    "/v1/load_lora_adapter": (commands.load_lora, bodies.LoadLoraBody, LOAD_LORA_OF_VLLM),
    "/v1/unload_lora_adapter": (commands.unload_lora, bodies.UnloadLoraBody, UNLOAD_LORA_OF_VLLM),
    "/v1/loras": (loras.add_lora, bodies.AddLoraBody, LORA_OF_PRIME),
    "/init_weight_transfer_engine": (commands.init_weight_transfer, bodies.InitTransferBody, VLLM),
    "/start_weight_update": (commands.start_weight_update, bodies.StartTransferBody, VLLM),
    "/finish_weight_update": (commands.finish_weight_update, bodies.FinishTransferBody, VLLM),
}
"""By path, all of them `POST`: the function that executes the command, the struct of its fields in the body or query,
and the style of the answer."""


def _route(command: Command, body: type[bodies.SendBody], style: ResponseStyle) -> HttpRoute:
    async def handle(service: Service, request: Request) -> Response:
        return await command(CommandCall(service, request, await read_fields(service, request, body), style))

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


_WEIGHT_INFO: Final = HttpRoute(reads.weight_info, query=reads.FleetQuery)
ADMIN_ROUTES: Final[RouteTable] = {
    **{("POST", path): _route(*command) for path, command in _COMMANDS.items()},
    ("DELETE", "/v1/loras/{name:path}"): HttpRoute(loras.remove_lora, query=bodies.SendBody),
    **not_served.NOT_SERVED_ROUTES,
}
"""Routes that change the fleet, or that would change it if the service supported them."""
ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/operations/{id}"): HttpRoute(operations.operation),
    ("GET", "/v1/rl/health"): HttpRoute(reads.rl_health, query=reads.FleetQuery),
    ("GET", "/v1/rl/weight_version"): HttpRoute(reads.weight_version, query=reads.FleetQuery),
    ("GET", "/is_paused"): HttpRoute(reads.is_paused, query=reads.FleetQuery),
    ("GET", "/is_sleeping"): HttpRoute(reads.is_sleeping, query=reads.FleetQuery),
    ("GET", "/weight_info"): _WEIGHT_INFO,
    ("GET", "/v1/rl/weight_info"): _WEIGHT_INFO,
    ("GET", "/get_world_size"): HttpRoute(ranks.get_world_size, query=ranks.WorldQuery),
    ("GET", "/v1/loras"): HttpRoute(loras.list_loras, query=reads.FleetQuery),
    ("GET", "/liveness"): HttpRoute(reads.liveness, query=reads.FleetQuery),
    **not_served.DATA_ROUTES,
}
"""Routes that only read the state of the fleet, or that the service does not serve to users."""
