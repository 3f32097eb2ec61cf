"""Our own control routes: answered with the ledger."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.http.control import commands
from frontend.http.control.answers import RL
from frontend.http.service import Service

__all__ = ["abort", "flush_cache", "load_lora", "pause", "resume", "unload_lora", "update_weights"]


async def pause(service: Service, request: Request) -> Response:
    """Have workers take no more requests; with `async`, 202 and an operation that can be asked for."""
    return await commands.pause(service, request, RL)


async def resume(service: Service, request: Request) -> Response:
    """Undo a pause, and a drain."""
    return await commands.resume(service, request, RL)


async def flush_cache(service: Service, request: Request) -> Response:
    """Forget the prefix caches."""
    return await commands.flush_cache(service, request, RL)


async def update_weights(service: Service, request: Request) -> Response:
    """Replace the weights of all workers of a model, as one."""
    return await commands.update_weights(service, request, RL)


async def load_lora(service: Service, request: Request) -> Response:
    """Load a LoRA adapter into all workers of a model, or replace the one of the same name."""
    return await commands.load_lora(service, request, RL)


async def unload_lora(service: Service, request: Request) -> Response:
    """Unload a LoRA adapter; one that is not there is fine."""
    return await commands.unload_lora(service, request, RL)


async def abort(service: Service, request: Request) -> Response:
    """End requests in flight, of whichever client; 404 if no worker has any of them."""
    return await commands.abort(service, request, RL)
