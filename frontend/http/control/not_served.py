"""Routes that clients of vLLM and prime-rl may call and that are not served: each says what to use instead.

They are answered 501, not 404: prime-rl, for one, takes a route that is not there for a server that does not need it.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ..errors import HttpError
from ..service import Handler, HttpRoute, RouteTable, Service

__all__ = ["ROUTES"]

INSTEAD: Final = {
    ("POST", "/init_broadcaster"): (
        "prime-rl's broadcasts by NCCL and NIXL need its own code inside the engines; use its weight broadcast by"
        " filesystem (/update_weights with weight_dir), or vLLM's transfer (/init_weight_transfer_engine)"
    ),
    ("POST", "/reload_weights"): "use /v1/rl/update_weights with the first checkpoint's path and allow_rollback",
    ("POST", "/update_weight_version"): (
        "a version moves with its weights only; use `weight_version` of /finish_weight_update, or `version` of"
        " /v1/rl/update_weights"
    ),
    ("POST", "/start_draft_weight_update"): "use /update_weights: draft models have no weights of their own here",
    ("POST", "/collective_rpc"): (
        "methods inside the engines cannot be called; use the commands, such as /v1/rl/update_weights"
    ),
    ("POST", "/release_kv_cache_memory"): "use /sleep, which gives up the KV cache with all other memory",
    ("POST", "/shutdown_weight_transfer_engine"): (
        "engines keep the group of /init_weight_transfer_engine until they end; restart the workers to leave it"
    ),
    ("POST", "/weight_checker"): (
        "use /v1/rl/state: each worker verifies the weights that it loads, against the files and by a canary"
    ),
    (
        "POST",
        "/v1/embeddings",
    ): "there are no models that embed, classify or rank; /v1/models lists those that generate",
    ("POST", "/v1/messages"): "use /v1/chat/completions",
    ("POST", "/v1/responses"): "use /v1/chat/completions",
    ("POST", "/reset_mm_cache"): "there are no images, audio or video here; use /reset_prefix_cache",
    ("POST", "/reset_encoder_cache"): "there are no images, audio or video here; use /reset_prefix_cache",
}
"""By method and path."""


def _refusal(method: str, path: str, instead: str) -> Handler:
    async def refuse(_service: Service, _request: Request) -> Response:
        raise HttpError(501, f"{method} {path} is not served: {instead}", code="not_served")

    refuse.__doc__ = f"Not served: {instead}."
    return refuse


ROUTES: Final[RouteTable] = {key: HttpRoute(_refusal(*key, instead), answer={}) for key, instead in INSTEAD.items()}
