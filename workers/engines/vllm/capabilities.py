"""What a started vLLM engine can do, read from its own configuration."""

from typing import TYPE_CHECKING

from schemas.limits import MAX_LOGPROBS
from schemas.presence import Capabilities, RoutedExpertsInfo
from schemas.rows import dtype_for
from workers.engines.vllm.params import extra_names

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["describe_engine", "describe_routing"]


def describe_engine(config: "VllmConfig") -> Capabilities:
    """The capabilities of an engine with this configuration, as it stands after the engine has started."""
    import vllm

    model = config.model_config
    vocab_size = model.get_vocab_size()
    return Capabilities(
        engine="vllm",
        engine_version=vllm.__version__,
        # Start-up may have lowered it to what the KV cache holds.
        max_model_len=model.max_model_len,
        # Of the model: an id that only the tokenizer knows would index outside the embedding.
        vocab_size=vocab_size,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_logprobs=min(vocab_size if model.max_logprobs == -1 else model.max_logprobs, MAX_LOGPROBS),
        dtype=str(model.dtype).removeprefix("torch."),
        routed_experts=describe_routing(model) if model.enable_return_routed_experts else None,
        logprobs_mode=str(model.logprobs_mode),
        priority=config.scheduler_config.policy == "priority",
        extra=extra_names(model),
    )


def describe_routing(model: "ModelConfig") -> RoutedExpertsInfo | None:
    """The shape of the model's routing; None when it has no experts.

    vLLM's rows have all hidden layers; those without experts are zeros
    (model_executor/layers/fused_moe/routed_experts_capturer.py: _get_routed_experts_shape).
    """
    num_experts = model.get_num_experts()
    if not num_experts:
        return None
    return RoutedExpertsInfo(
        num_layers=model.get_total_num_hidden_layers(),
        top_k=model.get_num_experts_per_tok(),
        num_experts=num_experts,
        dtype=dtype_for(num_experts),
    )
