"""Control routes: ours under `/v1/rl/`, and the names by which clients of vLLM and prime-rl call the same.

Whatever changes the fleet is for admins; what only looks is for all who may send requests. A command is recorded before
the workers hear of it: a client that leaves does not end it.
"""

from typing import Any, Final

from frontend.http.control import bodies, not_served, operations, reads, rl, transfer, vllm
from frontend.http.service import Handler, RouteTable

__all__ = ["ADMIN_ROUTES", "ANSWERS", "BODIES", "QUERIES", "ROUTES"]

_COMMANDS: Final[dict[tuple[str, str], tuple[Handler, type[bodies.SendBody]]]] = {
    ("POST", "/v1/rl/pause"): (rl.pause, bodies.PauseBody),
    ("POST", "/v1/rl/resume"): (rl.resume, bodies.ResumeBody),
    ("POST", "/v1/rl/flush_cache"): (rl.flush_cache, bodies.FlushBody),
    ("POST", "/v1/rl/update_weights"): (rl.update_weights, bodies.UpdateBody),
    ("POST", "/v1/rl/load_lora_adapter"): (rl.load_lora, bodies.LoadLoraBody),
    ("POST", "/v1/rl/unload_lora_adapter"): (rl.unload_lora, bodies.UnloadLoraBody),
    ("POST", "/v1/rl/abort"): (rl.abort, bodies.AbortBody),
    ("POST", "/pause"): (vllm.pause, bodies.PauseBody),
    ("POST", "/resume"): (vllm.resume, bodies.ResumeBody),
    ("POST", "/abort_requests"): (vllm.abort_requests, bodies.AbortBody),
    ("POST", "/sleep"): (vllm.sleep, bodies.SleepBody),
    ("POST", "/wake_up"): (vllm.wake_up, bodies.WakeBody),
    ("POST", "/reset_prefix_cache"): (vllm.reset_prefix_cache, bodies.FlushBody),
    ("POST", "/update_weights"): (vllm.update_weights, bodies.UpdateBody),
    ("POST", "/load_lora_adapter"): (vllm.load_lora, bodies.LoadLoraBody),
    ("POST", "/unload_lora_adapter"): (vllm.unload_lora, bodies.UnloadLoraBody),
    ("POST", "/v1/load_lora_adapter"): (vllm.load_lora_adapter, bodies.LoadLoraBody),
    ("POST", "/v1/unload_lora_adapter"): (vllm.unload_lora_adapter, bodies.UnloadLoraBody),
    ("POST", "/init_weight_transfer_engine"): (transfer.init_weight_transfer_engine, bodies.InitTransferBody),
    ("POST", "/start_weight_update"): (transfer.start_weight_update, bodies.StartTransferBody),
    ("POST", "/finish_weight_update"): (transfer.finish_weight_update, bodies.FinishTransferBody),
}
"""What carries out a command, and what it reads: from a body, or from the query."""
ADMIN_ROUTES: Final[RouteTable] = {
    **{route: handler for route, (handler, _) in _COMMANDS.items()},
    **not_served.ROUTES,
}
"""They change the fleet, or would."""
ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/operations/{id}"): operations.operation,
    ("GET", "/v1/rl/health"): reads.rl_health,
    ("GET", "/v1/rl/weight_version"): reads.weight_version,
    ("GET", "/is_paused"): reads.is_paused,
    ("GET", "/is_sleeping"): reads.is_sleeping,
    ("GET", "/weight_info"): reads.weight_info,
    ("GET", "/liveness"): reads.liveness,
}
"""They only look."""
BODIES: Final[dict[tuple[str, str], object]] = {
    **{route: body for route, (_, body) in _COMMANDS.items()},
    **dict.fromkeys(not_served.ROUTES),
}
"""What the routes read."""
QUERIES: Final[dict[tuple[str, str], type]] = {
    **{route: body for route, (_, body) in _COMMANDS.items()},
    **{route: reads.FleetQuery for route, handler in ROUTES.items() if handler is not operations.operation},
}
"""What they take as query parameters: commands the same as in their bodies, as far as it fits into one."""
ANSWERS: Final[dict[tuple[str, str], object]] = {
    **{route: {} for route in not_served.ROUTES},
    **{route: {200: Any, 207: Any} for route in _COMMANDS if route[1].startswith("/v1/rl/")},
    **{("POST", path): {200: Any, 202: Any, 207: Any} for path in ("/v1/rl/pause", "/pause")},
    **{("POST", f"/v1/{verb}_lora_adapter"): "text/plain" for verb in ("load", "unload")},
}
"""Where they answer something else than JSON with status 200."""
