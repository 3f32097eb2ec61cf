"""A check whether the installed vLLM returns routed experts on this machine; from 0.31 on it does so only on GPUs."""

import functools

from rollbus.workers.engines.vllm.launch import cpu_refusal, set_environment


@functools.cache
def no_routing_here() -> str | None:
    """Return why vLLM returns no routed experts here, or None if it returns them."""
    # The environment must be set before `cpu_refusal` imports vLLM.
    set_environment("", None)
    return cpu_refusal()
