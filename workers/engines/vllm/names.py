"""The supported releases of vLLM, and a check of the names of vLLM that a worker's own process uses.

An engine checks them when it starts. `make vllm-contract` compares names, fields and signatures with the sources of
each supported release, also of what runs in the engine core and in vLLM's worker processes.
"""

import importlib
import importlib.util
import inspect
import logging
import re
from typing import Any

from ....schemas.checks import list_names
from ....schemas.errors import EngineDead
from ....schemas.options import pip_install

logger = logging.getLogger(__name__)

FIRST, PAST = (0, 30), (0, 34)
"""Engines start with releases from `FIRST` on. Releases before `PAST` are tested."""
MAX_NAMED = 12
"""Maximum number of missing names in a message."""
NAMES = {
    "vllm": "SamplingParams __version__",
    "vllm.config": "KVTransferConfig StructuredOutputsConfig VllmConfig",
    "vllm.config:CacheConfig": "block_size cache_dtype enable_prefix_caching num_gpu_blocks",
    "vllm.config:DeviceConfig": "device_type",
    "vllm.config:KVTransferConfig": "is_kv_consumer is_kv_producer kv_connector kv_connector_extra_config "
    "kv_connector_module_path kv_role",
    "vllm.config:LoRAConfig": "max_cpu_loras max_lora_rank max_loras",
    "vllm.config:LoadConfig": "load_format",
    "vllm.config:ModelConfig": "dtype enable_sleep_mode enable_trace_replay get_num_experts get_num_experts_per_tok "
    "get_total_num_hidden_layers get_vocab_size logprobs_mode max_logprobs max_model_len model model_weights "
    "quantization revision seed try_get_generation_config use_mla",
    "vllm.config:ParallelConfig": "data_parallel_index data_parallel_size decode_context_parallel_size "
    "distributed_executor_backend nnodes pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size "
    "use_ray worker_extension_cls world_size world_size_across_dp",
    "vllm.config:SchedulerConfig": "max_num_seqs policy",
    "vllm.config:StructuredOutputsConfig": "backend",
    "vllm.config:VllmConfig": "cache_config device_config kv_transfer_config load_config lora_config model_config "
    "parallel_config scheduler_config structured_outputs_config use_v2_model_runner weight_transfer_config",
    "vllm.engine.arg_utils:AsyncEngineArgs": "block_size create_engine_config create_model_config data_parallel_size "
    "disable_log_stats distributed_executor_backend enable_lora enable_return_routed_experts enforce_eager "
    "gpu_memory_utilization kv_cache_memory_bytes kv_offloading_size kv_transfer_config logprobs_mode max_cpu_loras "
    "max_loras max_model_len model structured_outputs_config use_tqdm_on_load weight_transfer_config "
    "worker_extension_cls",
    "vllm.envs": "VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING "
    "VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
    "VLLM_MAX_NUM_BAD_WORDS VLLM_NO_USAGE_STATS VLLM_PLUGINS",
    "vllm.exceptions": "VLLMClientError VLLMValidationError",
    "vllm.inputs.engine": "tokens_input",
    "vllm.lora.request": "LoRARequest",
    "vllm.platforms": "current_platform",
    "vllm.platforms.interface:Platform": "device_type get_device_name is_cpu",
    "vllm.plugins": "DEFAULT_PLUGINS_GROUP",
    "vllm.sampling_params:SamplingParams": "_bad_words_token_ids allowed_token_ids bad_words detokenize extra_args "
    "flat_logprobs frequency_penalty ignore_eos include_stop_str_in_output logit_bias logprob_token_ids logprobs "
    "max_tokens min_p min_tokens n output_kind output_text_buffer_length presence_penalty prompt_logprobs "
    "repetition_penalty routed_experts_prompt_start seed skip_clone skip_special_tokens spaces_between_special_tokens "
    "stop stop_token_ids stream_interval temperature top_k top_p trace_decode_token_ids",
    "vllm.utils.import_utils": "resolve_obj_by_qualname",
    "vllm.utils.ompmultiprocessing": "OMPProcessManager",
    "vllm.v1.engine": "EngineCoreRequest FINISH_REASON_STRINGS",
    "vllm.v1.engine.async_llm:AsyncLLM": "collective_rpc engine_core generate get_supported_tasks input_processor "
    "list_loras remove_lora reset_prefix_cache shutdown sleep vllm_config wake_up",
    "vllm.v1.engine.core_client:AsyncMPClient": "_call_utility_async abort_requests_async add_request_async "
    "call_utility_async core_engines outputs_queue pause_scheduler_async resources resume_scheduler_async",
    "vllm.v1.engine.core_client:BackgroundResources": "output_queue_task",
    "vllm.v1.engine.exceptions": "EngineDeadError",
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs",
    "vllm.v1.engine.utils": "get_mp_context",
    "vllm.v1.engine:EngineCoreEvent": "timestamp type",
    "vllm.v1.engine:EngineCoreEventType": "PREEMPTED SCHEDULED",
    "vllm.v1.engine:EngineCoreOutput": "events finish_reason kv_transfer_params new_logprobs "
    "new_prompt_logprobs_tensors new_token_ids prefill_stats request_id routed_experts stop_reason",
    "vllm.v1.engine:EngineCoreOutputs": "engine_index outputs scheduler_stats timestamp",
    "vllm.v1.engine:FinishReason": "ABORT",
    "vllm.v1.executor:Executor": "get_class",
    "vllm.v1.metrics.stats:PrefillStats": "num_cached_tokens num_computed_tokens num_external_cached_tokens",
    "vllm.v1.metrics.stats:PrefixCacheStats": "hits queries",
    "vllm.v1.metrics.stats:SchedulerStats": "kv_cache_usage num_running_reqs num_skipped_waiting_reqs num_waiting_reqs "
    "prefix_cache_stats",
    "vllm.v1.outputs": "LogprobsLists LogprobsTensors",
}
"""Names of a module, or members of a class in it (`module:class`), that each supported release has."""


def check_names() -> None:
    """Compare the release and the names of the imported vLLM with those that the worker uses.

    Raises:
        EngineDead: vLLM is not installed, or is too old, or lacks names; the message has the release and the names.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineDead(f"vLLM is not installed: {pip_install('worker')}")
    release = importlib.import_module("vllm").__version__
    proven = f"{FIRST[0]}.{FIRST[1]} to {PAST[0]}.{PAST[1] - 1}"
    if numbers_of(release) < FIRST:
        raise EngineDead(f"vLLM {release} is too old for the rollbus worker; allowed: {proven}, as released")
    if numbers_of(release) >= PAST:
        logger.warning("engine.unverified_release_detected release=%s proven=%r", release, proven)
    gaps = [gap for where, names in NAMES.items() for gap in _find_gaps(where, names.split())]
    if gaps:
        named = list_names(gaps, "; ", MAX_NAMED)
        raise EngineDead(
            f"vLLM {release} lacks parts that the rollbus worker uses: {named}; allowed: {proven}, as released"
        )


def numbers_of(release: str) -> tuple[int, ...]:
    """Return the first two numbers of a release, such as (0, 30)."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def _find_gaps(where: str, names: list[str]) -> list[str]:
    """Return what vLLM lacks of these names, one short text each."""
    module, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or not module.startswith(exc.name):
            raise
        return [f"there is no module {module}"]
    if name and not hasattr(found, name):
        return [f"{module} has no {name!r}"]
    if name:
        known = _members_of(getattr(found, name))
    else:
        # Some modules create names when they are first used.
        known = {*dir(found), *(member for member in names if member not in dir(found) and hasattr(found, member))}
    return [f"{where.replace(':', '.')} has no {member!r}" for member in names if member not in known]


def _members_of(kind: type) -> set[str]:
    """Return the attributes, fields and annotations of a class, and the names that its constructor sets or uses."""
    members = {*dir(kind), *getattr(kind, "__struct_fields__", ())}
    for base in kind.__mro__:
        members.update(vars(base).get("__annotations__", ()))
        code = getattr(inspect.unwrap(vars(base).get("__init__", kind)), "__code__", None)
        members.update(() if code is None else code.co_names)
    return members
