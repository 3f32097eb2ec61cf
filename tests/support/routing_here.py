"""Whether the installed vLLM returns routed experts on this machine: from 0.31 on it does so on GPUs only."""

import functools

from rollbus.workers.engines.vllm.launch import set_environment
from rollbus.workers.engines.vllm.routing import cpu_refusal

__all__ = ["no_routing_here"]


@functools.cache
def no_routing_here() -> str | None:
    """Return why it does not; None: it does."""
    # Before vLLM is imported, which this does.
    set_environment("", None)
    return cpu_refusal()
