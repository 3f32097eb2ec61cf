"""Capabilities of a started vLLM engine, read from its own configuration."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ....schemas.limits import MAX_LOGPROBS
from ....schemas.presence import Capabilities, RoutedExpertsInfo, SamplingLimits, WorkerRole
from ....schemas.rows import dtype_for
from ..rates import PrefixAge
from .kv.config import describe_connector
from .launch import CPU_UNUSED_LORAS, OWN_SLOTS, returns_routing, routing_refusal
from .params import extra_names

if TYPE_CHECKING:
    from vllm.config import LoRAConfig, ModelConfig, VllmConfig


@dataclass(slots=True)
class Refusals:
    """Readable reasons why an engine does not support an operation; None: the engine supports it."""

    weight_updates: str | None = None
    weight_transfer: str | None = None
    loras: str | None = None
    prompt_logprobs: str | None = None
    sleep: str | None = None


def describe_engine(config: "VllmConfig", role: WorkerRole = "both") -> Capabilities:
    """Return the capabilities of an engine; `config` is its configuration after the start."""
    import vllm

    model = config.model_config
    vocab_size = model.get_vocab_size()
    refusals = find_refusals(config)
    data_parallel_size = config.parallel_config.data_parallel_size
    return Capabilities(
        engine="vllm",
        engine_version=vllm.__version__,
        # The start of the engine may have lowered this to the capacity of the KV cache.
        max_model_len=model.max_model_len,
        # The model's size, not the tokenizer's: an id that only the tokenizer has would index outside the embedding.
        vocab_size=vocab_size,
        max_num_seqs=(config.scheduler_config.max_num_seqs - OWN_SLOTS) * data_parallel_size,
        max_logprobs=min(vocab_size if model.max_logprobs == -1 else model.max_logprobs, MAX_LOGPROBS),
        dtype=str(model.dtype).removeprefix("torch."),
        routed_experts=describe_routing(model) if returns_routing(config) else None,
        routing_refusal=routing_refusal(config),
        logprobs_mode=str(model.logprobs_mode),
        priority=config.scheduler_config.policy == "priority",
        extra=extra_names(model),
        signature=_signature(config, vllm.__version__),
        weight_updates=refusals.weight_updates is None,
        weight_transfer=refusals.weight_transfer is None,
        max_loras=0 if refusals.loras is not None else _max_loras(config.lora_config),
        sleep=refusals.sleep is None,
        data_parallel_size=data_parallel_size,
        role=role,
        kv_connector=describe_connector(config),
        max_lora_rank=None if refusals.loras is not None else config.lora_config.max_lora_rank,
        world_size=config.parallel_config.world_size_across_dp,
        version_labels=True,
        # If vLLM cannot return a sampling mask, it rejects the option (config/vllm.py: _verify_sampling_replay_config).
        sampling_mask=bool(getattr(model, "return_sampling_mask", False)),
        weight_deltas=not _may_span_machines(config),
        weight_digests=not _may_span_machines(config),
        grammar_backend=config.structured_outputs_config.backend,
        sampling_limits=_sampling_limits(config) if config.use_v2_model_runner else None,
    )


def _sampling_limits(config: "VllmConfig") -> SamplingLimits:
    """Return the limits of vLLM's newer model runner. A request above one of them would kill the engine."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias

    eos = config.model_config.try_get_generation_config().get("eos_token_id")
    # The sampler also holds the end-of-sequence tokens: those of the generation config and that of the tokenizer.
    num_eos = 1 + (len(eos) if isinstance(eos, list) else 1)
    return SamplingLimits(
        allowed_token_ids=logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        logit_bias=logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        min_tokens_stop_ids=max(logit_bias.MAX_NUM_STOP_TOKEN_IDS - num_eos, 0),
        bad_words=envs.VLLM_MAX_NUM_BAD_WORDS,
        bad_words_tokens=envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    )


def find_refusals(config: "VllmConfig") -> Refusals:
    """Return the operations that an engine with this configuration does not support, with reasons."""
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.platforms import current_platform

    refusals = Refusals()
    if not Path(config.model_config.model).is_dir():
        refusals.weight_updates = "weights can be reloaded only if the model was started from a local folder"
    elif not hasattr(get_model_loader(config.load_config), "get_all_weights"):
        refusals.weight_updates = f"weights of the load format {config.load_config.load_format!r} cannot be reloaded"
    elif not getattr(config.parallel_config, "worker_extension_cls", ""):
        refusals.weight_updates = "this release of vLLM does not support an extension of its workers"
    if getattr(config, "weight_transfer_config", None) is None:
        refusals.weight_transfer = "the engine has no transfer engine; set the engine argument 'weight_transfer_config'"
    if config.lora_config is None:
        refusals.loras = (
            "the engine loads no adapters; set the engine argument 'enable_lora' (not supported for experts on a CPU)"
        )
    elif "load_inplace" not in LoRARequest.__struct_fields__:
        refusals.loras = "this release of vLLM cannot replace an adapter in place"
    if current_platform.is_cpu():
        refusals.sleep = "on a CPU, vLLM's sleep frees no memory"
        if config.lora_config is not None:
            # lora/punica_wrapper/punica_cpu.py: add_lora_logits expects one position of each request.
            refusals.prompt_logprobs = "would kill an engine with 'enable_lora' on a CPU"
    elif not config.model_config.enable_sleep_mode:
        refusals.sleep = "the engine cannot sleep; set the engine argument 'enable_sleep_mode'"
    return refusals


def prefix_age_of(config: "VllmConfig") -> PrefixAge | None:
    """Return the estimator of the age of prefixes in the cache of a started engine with this configuration.

    None: the engine caches no prefixes, or it has several prefix caches, which evict prefixes independently.
    """
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.enable_prefix_caching or not cache.num_gpu_blocks or parallel.data_parallel_size > 1:
        return None
    # The context is divided between several vLLM workers, and a block has `block_size` tokens on each of them.
    block_tokens = cache.block_size * parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return PrefixAge(cache.num_gpu_blocks * block_tokens, block_tokens)


def kv_cache_tokens_of(config: "VllmConfig") -> int | None:
    """Return the number of tokens that fit into the KV caches of a started engine with this configuration.

    None: the engine does not report the number. Only vLLM can count it: groups of layers may share blocks, so the
    number of blocks is not sufficient.
    """
    return getattr(config.cache_config, "kv_cache_size_tokens", None) or None


def _may_span_machines(config: "VllmConfig") -> bool:
    """Return True if processes of the engine may run on other machines, which lack the files that this one fetches.

    Ray places processes after this configuration is made, so several processes with Ray count as several machines.
    """
    parallel = config.parallel_config
    return bool(parallel.nnodes > 1 or (parallel.use_ray and parallel.world_size_across_dp > 1))


def _max_loras(lora: "LoRAConfig") -> int:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return int(lora.max_loras) - CPU_UNUSED_LORAS
    # The adapters that vLLM keeps in memory, some outside of the device. Beyond it, vLLM unloads the oldest adapter.
    return int(lora.max_cpu_loras or lora.max_loras)


def _signature(config: "VllmConfig", version: str) -> str:
    """Return the properties with which two engines compute equal results, up to rounding, from equal weights."""
    from vllm.platforms import current_platform

    model, parallel = config.model_config, config.parallel_config
    device = platform.machine() if current_platform.is_cpu() else current_platform.get_device_name()
    parts = [
        f"vllm-{version}",
        f"{current_platform.device_type}-{device}".replace(" ", "-"),
        f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}-dp{parallel.data_parallel_size}",
        str(model.dtype).removeprefix("torch."),
        f"kv-{config.cache_config.cache_dtype}",
    ]
    return " ".join([*parts, str(model.quantization)] if model.quantization else parts)


def describe_routing(model: "ModelConfig") -> RoutedExpertsInfo | None:
    """Return the shape of the model's routed experts; None: the model has no experts.

    vLLM's rows contain all hidden layers; layers without experts are zeros
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
