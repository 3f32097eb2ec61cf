"""Rotary position embeddings on a CPU: all heads of a query are rotated by the angles of their token.

vLLM's kernel for CPUs takes `[token, head * number]`. If a query is `[token, head, number]`, as in latent attention
(layers/mla.py), the kernel takes each head for a token of its own, and logprobs are off by more than 1. The Python of
0.30 to 0.33 is the same there. vLLM uses no kernel if it compiles the model, or if the model's config scales positions.
"""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["rotate_all_heads"]

FLAT = 2
"""Dimensions of a query that the kernel rotates right."""
Kernel = Callable[[Any, Any, Any], tuple[Any, Any]]


def rotate_all_heads(model_runner: Any) -> None:
    """Give vLLM's kernel flat queries and keys; called once the model is loaded. Nothing changes on a GPU.

    Raises:
        AttributeError: this release of vLLM chooses the kernel in another way.
    """
    if model_runner.device.type != "cpu":
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in model_runner.get_model().modules():
        if isinstance(module, RotaryEmbedding):
            chosen: Any = module._forward_method
            # Bound to the module, unless it was compiled or has been replaced here.
            if getattr(chosen, "__func__", None) is RotaryEmbedding.forward_cpu:
                module._forward_method = functools.partial(_rotate_flat, chosen)


def _rotate_flat(kernel: Kernel, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
    """Return the rotated query and key in the shapes that they have; there may be no key."""
    rotated = kernel(positions, _flat(query), None if key is None else _flat(key))
    return rotated[0].view(query.shape), None if key is None else rotated[1].view(key.shape)


def _flat(heads: Any) -> Any:
    return heads.flatten(1) if heads.dim() > FLAT else heads
