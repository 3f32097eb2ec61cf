"""The same commands under the names of vLLM and prime-rl, answered as their clients expect.

Part of the workers is no success here: those clients were written for one engine, and take any 2xx for one.
"""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from frontend.http.control import commands
from frontend.http.control.answers import LORA_OF_VLLM, VLLM
from frontend.http.service import Service

__all__ = [
    "abort_requests",
    "load_lora",
    "load_lora_adapter",
    "pause",
    "reset_prefix_cache",
    "resume",
    "sleep",
    "unload_lora",
    "unload_lora_adapter",
    "update_weights",
    "wake_up",
]


async def pause(service: Service, request: Request) -> Response:
    """Pause, with vLLM's query parameters, or a body; the default is `mode=keep`."""
    return await commands.pause(service, request, VLLM)


async def resume(service: Service, request: Request) -> Response:
    """Resume."""
    return await commands.resume(service, request, VLLM)


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget the prefix caches; requests in flight make it fail, unless `reset_running_requests`."""
    return await commands.flush_cache(service, request, VLLM)


async def update_weights(service: Service, request: Request) -> Response:
    """Take vLLM's `update_info`: a part of the weights; prime-rl's `weight_dir`: a folder with all of them."""
    return await commands.update_weights(service, request, VLLM)


async def load_lora_adapter(service: Service, request: Request) -> Response:
    """vLLM's: one of that name must not be there yet, unless `load_inplace`; answered with a line of text."""
    answer = await commands.load_lora(service, request, LORA_OF_VLLM, load_inplace=False)
    return _as_text(answer, "Success: LoRA adapter added successfully.")


async def unload_lora_adapter(service: Service, request: Request) -> Response:
    """vLLM's; one that is not there is fine; answered with a line of text."""
    return _as_text(await commands.unload_lora(service, request, VLLM), "Success: LoRA adapter removed successfully.")


def _as_text(answer: Response, text: str) -> Response:
    return PlainTextResponse(text) if answer.status_code == 200 else answer


async def load_lora(service: Service, request: Request) -> Response:
    """prime-rl's: one of that name is replaced."""
    return await commands.load_lora(service, request, LORA_OF_VLLM)


async def unload_lora(service: Service, request: Request) -> Response:
    """Unload a LoRA adapter."""
    return await commands.unload_lora(service, request, VLLM)


async def abort_requests(service: Service, request: Request) -> Response:
    """End requests in flight; those that nobody has are not counted in `aborted`."""
    return await commands.abort(service, request, VLLM)


async def sleep(service: Service, request: Request) -> Response:
    """Have engines give up their memory; requests in flight go back to the queue."""
    return await commands.sleep(service, request, VLLM)


async def wake_up(service: Service, request: Request) -> Response:
    """Have engines take their memory back."""
    return await commands.wake(service, request, VLLM)
