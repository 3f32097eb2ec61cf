"""Corrects rotary position embeddings on a CPU: all heads of a query must be rotated by the angles of their token.

vLLM's kernel for CPUs expects `[token, head * number]`. In latent attention, a query is `[token, head, number]`
(layers/mla.py). The kernel then treats each head as a separate token, and logprobs are wrong by more than 1. The Python
code of 0.30 to 0.33 is the same there. vLLM uses no kernel if it compiles the model, or if the model's config scales
positions.
"""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["rotate_all_heads"]

FLAT = 2
"""Number of dimensions of a query that the kernel rotates correctly."""
Kernel = Callable[[Any, Any, Any], tuple[Any, Any]]


def rotate_all_heads(model_runner: Any) -> None:
    """Pass flat queries and keys to vLLM's kernel. Call this after the model is loaded; no effect on a GPU.

    Raises:
        AttributeError: this release of vLLM selects the kernel in another way.
    """
    if model_runner.device.type != "cpu":
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in model_runner.get_model().modules():
        if isinstance(module, RotaryEmbedding):
            chosen: Any = module._forward_method
            # The method is bound to the module, unless vLLM compiled it or this function replaced it before.
            if getattr(chosen, "__func__", None) is RotaryEmbedding.forward_cpu:
                module._forward_method = functools.partial(_rotate_flat, chosen)


def _rotate_flat(kernel: Kernel, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
    """Return the rotated query and key in their original shapes; the key may be None."""
    rotated = kernel(positions, _flat(query), None if key is None else _flat(key))
    return rotated[0].view(query.shape), None if key is None else rotated[1].view(key.shape)


def _flat(heads: Any) -> Any:
    return heads.flatten(1) if heads.dim() > FLAT else heads
