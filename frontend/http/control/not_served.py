"""Routes of vLLM, prime-rl and OpenAI that this service does not serve. Each answer names the alternative.

The status is 501 instead of 404. For example, prime-rl treats 404 as a server that does not need this route.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ..errors import HttpError
from ..service import Handler, HttpRoute, RouteTable, Service

__all__ = ["NOT_SERVED_ROUTES", "DATA_ROUTES"]

INSTEAD: Final = {
    ("POST", "/init_broadcaster"): (
        "prime-rl's broadcasts over NCCL and NIXL need prime-rl's code inside the engines; use its broadcast through"
        " the filesystem (/update_weights with weight_dir), or vLLM's transfer (/init_weight_transfer_engine)"
    ),
    ("POST", "/reload_weights"): "use /v1/rl/update_weights with the path of the first checkpoint and allow_rollback",
    ("POST", "/update_weight_version"): (
        "a version changes only together with its weights; use `weight_version` of /finish_weight_update, or `version`"
        " of /v1/rl/update_weights"
    ),
    (
        "POST",
        "/start_draft_weight_update",
    ): "use /update_weights: this service has no draft models with separate weights",
    ("POST", "/collective_rpc"): (
        "clients cannot call methods of the engines; use the commands, for example /v1/rl/update_weights"
    ),
    ("POST", "/release_kv_cache_memory"): "use /sleep, which frees the KV cache and all other memory of the engine",
    ("POST", "/shutdown_weight_transfer_engine"): (
        "engines stay in the group of /init_weight_transfer_engine until they exit; restart the workers to leave it"
    ),
    ("POST", "/weight_checker"): (
        "use /v1/rl/state: each worker verifies its weights against the files and with a canary"
    ),
    (
        "POST",
        "/v1/embeddings",
    ): "no model of the fleet embeds, classifies or ranks; /v1/models lists the models that generate",
    ("POST", "/v1/messages"): "use /v1/chat/completions",
    ("POST", "/v1/responses"): "use /v1/chat/completions",
    ("POST", "/reset_mm_cache"): "this service accepts no images, audio or video; use /reset_prefix_cache",
    ("POST", "/reset_encoder_cache"): "this service accepts no images, audio or video; use /reset_prefix_cache",
}
"""The alternative to each route, by method and path."""


def _refusal(method: str, path: str, instead: str) -> Handler:
    async def refuse(_service: Service, _request: Request) -> Response:
        raise HttpError(501, f"{method} {path} is not served: {instead}", code="not_served")

    refuse.__doc__ = f"Not served: {instead}."
    return refuse


_ALL: Final[RouteTable] = {key: HttpRoute(_refusal(*key, instead), answer={}) for key, instead in INSTEAD.items()}
DATA_ROUTES: Final[RouteTable] = {key: route for key, route in _ALL.items() if key[1].startswith("/v1/")}
"""Routes of OpenAI, whose clients have the data token."""
NOT_SERVED_ROUTES: Final[RouteTable] = {key: route for key, route in _ALL.items() if key not in DATA_ROUTES}
"""Routes that would change the fleet."""
