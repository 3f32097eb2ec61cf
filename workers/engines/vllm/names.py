"""An entry of the contract with vLLM, the supported releases, and checks of calls; see `contract`.

TODO contract: The contract with vLLM: every name, field and signature that the adapter uses, and the releases that have it.

When an engine starts, `contract_check` compares the contract with the installed vLLM. Tests compare it with the sources
of other releases. The contract must list everything that this package imports from vLLM or uses of its objects.
tests/engine/test_contract.py finds entries that are missing.

TODO contract_loaded: Compares the imported modules of vLLM with the contract; see `contract`.

The imported modules can differ from their sources, because other code may have patched them.

TODO contract_source: Reads vLLM's sources without importing them, and finds names, members and signatures in them. See `contract`.

TODO contract_check: Compares the contract with the installed vLLM when an engine starts, or with sources that are not installed.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from ....schemas.errors import EngineDead
from ....schemas.options import pip_install

logger = logging.getLogger(__name__)


P = inspect.Parameter
FIRST, PAST = (0, 30), (0, 34)
"""The contract holds for releases from `FIRST` on. It is tested for releases before `PAST`."""


@dataclass(frozen=True, slots=True)
class Need:
    """The parts of one name in one vLLM module that the adapter uses.

    A call lists the arguments as the adapter passes them: the names of positional arguments in vLLM's order, then after
    `*` the names of keyword arguments. vLLM may accept more arguments if it does not require them.
    """

    where: str
    """A module, or a function, class or value in it as `module:name`."""
    _: KW_ONLY
    has: str = ""
    """Attributes, fields and methods of the class."""
    call: str | None = None
    """Arguments with which the adapter calls the function or class itself."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """Arguments with which the adapter calls methods of the class, without self."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Methods that the adapter implements, with exactly the parameters that vLLM passes. No other method is abstract.
    """
    reads: Mapping[str, str] = field(default_factory=dict)
    """A text that occurs exactly once in the source, by method; an empty key means the name itself."""
    since: tuple[int, int] = FIRST
    until: tuple[int, int] = (sys.maxsize, 0)
    """First release that no longer has the name."""

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        """Name in the module; empty: the module itself."""
        return self.where.partition(":")[2]


def call_gap(call: str, signature: inspect.Signature) -> str | None:
    """Return why this call does not fit the signature; None: the call fits.

    Args:
        call: names of positional arguments, then after `*` names of keyword arguments.
        signature: the signature without self.
    """
    before, _, behind = call.partition("*")
    by_position, by_keyword = before.split(), behind.split()
    parameters = list(signature.parameters.values())
    positional = [one for one in parameters if one.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is P.VAR_POSITIONAL for one in parameters)
    found = [one.name for one in positional][: len(by_position)]
    if found != by_position[: len(found)] or (len(found) < len(by_position) and not takes_any):
        return f"has the positional parameters ({', '.join(found)}) but the adapter passes ({', '.join(by_position)})"
    takes_any_name = any(one.kind is P.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)}
    for name in by_keyword:
        if name not in names and not takes_any_name:
            return f"has no parameter {name!r}"
    for one in parameters:
        is_given = one.name in {*by_position, *by_keyword}
        if one.default is P.empty and one.kind not in (P.VAR_POSITIONAL, P.VAR_KEYWORD) and not is_given:
            return f"requires {one.name!r}, which the adapter does not pass"
    return None


def override_gap(parameters: str, signature: inspect.Signature) -> str | None:
    """Return why a method with these parameters does not override vLLM's method; None: the method overrides it."""
    marks: dict[Any, str] = {P.VAR_POSITIONAL: "*", P.VAR_KEYWORD: "**"}
    found = " ".join(marks.get(one.kind, "") + one.name for one in signature.parameters.values())
    return None if found == parameters else f"has the parameters ({found}), but the adapter implements ({parameters})"


WORKER_CALLS = {
    "add_lora": "lora_request",
    "init_weight_transfer_engine": "init_info",
    "start_weight_update": "",
    "update_weights": "update_info",
    "finish_weight_update": "",
    "get_model": "",
}
CONTRACT: tuple[Need, ...] = (
    # Start of an engine.
    Need("vllm:__version__"),
    Need("vllm:SamplingParams"),
    Need("vllm:RequestOutput"),
    Need(
        "vllm.envs",
        has="VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_CONFIG_PATH "
        "VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_NUM_BAD_WORDS "
        "VLLM_NO_USAGE_STATS VLLM_PLUGINS",
    ),
    Need("vllm.plugins:DEFAULT_PLUGINS_GROUP"),
    Need(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        has="block_size data_parallel_size disable_log_stats distributed_executor_backend enable_lora "
        "enable_return_routed_experts enforce_eager gpu_memory_utilization kv_cache_memory_bytes "
        "kv_offloading_size kv_transfer_config logprobs_mode max_cpu_loras max_loras max_model_len model "
        "structured_outputs_config use_tqdm_on_load weight_transfer_config worker_extension_cls",
        calls={"create_engine_config": "", "create_model_config": ""},
    ),
    Need("vllm.platforms:current_platform"),
    Need("vllm.platforms.interface:Platform", has="device_type", calls={"is_cpu": "", "get_device_name": ""}),
    Need("vllm.v1.executor:Executor", calls={"get_class": "vllm_config"}),
    Need("vllm.utils.import_utils:resolve_obj_by_qualname", call="qualname"),
    Need("vllm.utils.ompmultiprocessing:OMPProcessManager", has="cpu_lists", call="config"),
    Need("vllm.v1.engine.utils:get_mp_context", call=""),
    Need("vllm.v1.engine.core"),
    Need("vllm.v1.executor.uniproc_executor"),
    # Configuration of the engine.
    Need(
        "vllm.config:VllmConfig",
        has="cache_config device_config kv_transfer_config load_config lora_config model_config parallel_config "
        "scheduler_config structured_outputs_config use_v2_model_runner weight_transfer_config",
    ),
    Need(
        "vllm.config:VllmConfig",
        reads={"__post_init__": "self.model_config.enable_return_routed_experts"},
        until=(0, 31),
    ),
    Need(
        "vllm.config:VllmConfig",
        # The text ends where the source splits the string.
        reads={"__post_init__": "--enable-return-routed-experts is incompatible with KV "},
        until=(0, 31),
    ),
    Need(
        "vllm.config:VllmConfig",
        has="aux_output_config",
        calls={"_verify_aux_output_compatibility": ""},
        reads={"_verify_aux_output_compatibility": "; PD auxiliary output is not supported"},
        since=(0, 31),
    ),
    Need("vllm.config.aux_output:AuxOutputConfig", has="enable_return_routed_experts", since=(0, 31)),
    Need(
        "vllm.config:ModelConfig",
        has="dtype enable_sleep_mode enable_trace_replay logprobs_mode max_logprobs max_model_len model model_weights "
        "quantization revision use_mla",
        calls={
            "get_num_experts": "",
            "get_num_experts_per_tok": "",
            "get_total_num_hidden_layers": "",
            "get_vocab_size": "",
            "try_get_generation_config": "",
        },
    ),
    Need("vllm.config:ModelConfig", has="enable_return_routed_experts", until=(0, 31)),
    Need(
        "vllm.config:ParallelConfig",
        has="data_parallel_size decode_context_parallel_size distributed_executor_backend nnodes "
        "pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size use_ray worker_extension_cls "
        "world_size world_size_across_dp",
    ),
    Need("vllm.config:SchedulerConfig", has="max_num_seqs policy"),
    Need("vllm.config:CacheConfig", has="block_size cache_dtype enable_prefix_caching num_gpu_blocks"),
    Need("vllm.config:LoadConfig", has="load_format"),
    Need("vllm.config:LoRAConfig", has="max_cpu_loras max_lora_rank max_loras"),
    Need("vllm.config:DeviceConfig", has="device_type"),
    Need(
        "vllm.config:KVTransferConfig",
        has="is_kv_consumer is_kv_producer kv_connector kv_connector_extra_config kv_connector_module_path kv_role",
    ),
    Need("vllm.config:StructuredOutputsConfig", has="backend"),
    Need(
        "vllm.v1.worker.gpu.sample.logit_bias",
        has="MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS MAX_NUM_STOP_TOKEN_IDS",
    ),
    # Requests into the engine, and outputs of the engine.
    Need(
        "vllm.v1.engine.async_llm:AsyncLLM",
        has="engine_core errored input_processor output_handler vllm_config",
        call="vllm_config executor_class * log_stats",
        calls={
            "abort": "request_id",
            "add_request": "request_id prompt params * lora_request priority trace_headers",
            "collective_rpc": "method timeout args kwargs",
            "get_supported_tasks": "",
            "list_loras": "",
            "remove_lora": "lora_id",
            "reset_prefix_cache": "reset_running_requests",
            "shutdown": "* timeout",
            "sleep": "level",
            "wake_up": "",
        },
    ),
    Need(
        "vllm.v1.engine.core_client:AsyncMPClient",
        has="core_engines outputs_queue resources",
        calls={
            "abort_requests_async": "request_ids",
            "add_request_async": "request",
            "get_output_async": "",
            "pause_scheduler_async": "* mode clear_cache",
            "resume_scheduler_async": "",
            "_call_utility_async": "method args * engine",
            "call_utility_async": "method args",
        },
    ),
    Need("vllm.v1.engine.core_client:BackgroundResources", has="output_queue_task"),
    Need(
        "vllm.v1.engine.core:EngineCore",
        has="scheduler",
        calls={
            "collective_rpc": "method timeout args kwargs",
            "list_loras": "",
            "remove_lora": "lora_id",
            "reset_prefix_cache": "reset_running_requests",
        },
    ),
    Need(
        "vllm.v1.core.sched.scheduler:Scheduler",
        has="prev_step_scheduled_req_ids requests running",
        calls={"_preempt_request": "request timestamp", "update_from_output": "scheduler_output model_runner_output"},
    ),
    Need("vllm.v1.engine:EngineCoreEvent", has="timestamp type", call="type timestamp"),
    Need("vllm.v1.engine:EngineCoreEventType", has="PREEMPTED SCHEDULED"),
    Need(
        "vllm.v1.engine.input_processor:InputProcessor",
        calls={"process_inputs": "request_id prompt params supported_tasks * lora_request priority trace_headers"},
    ),
    Need("vllm.inputs.engine:tokens_input", call="prompt_token_ids * cache_salt"),
    Need("vllm.v1.engine:EngineCoreRequest"),
    Need(
        "vllm.v1.engine:EngineCoreOutput",
        has="events finish_reason kv_transfer_params new_logprobs new_prompt_logprobs_tensors new_token_ids "
        "prefill_stats request_id routed_experts stop_reason",
        call="request_id new_token_ids * finish_reason",
    ),
    Need("vllm.v1.engine:EngineCoreOutput", has="error", since=(0, 33)),
    Need("vllm.outputs:RequestError", has="message", since=(0, 33)),
    Need("vllm.v1.engine:EngineCoreOutputs", has="engine_index outputs scheduler_stats timestamp", call="* outputs"),
    Need("vllm.v1.engine:FinishReason", has="ABORT"),
    # `rollbus.schemas.chunk.FinishReason` has a value for each of these.
    Need("vllm.v1.engine:FINISH_REASON_STRINGS", reads={"": '("stop", "length", "abort", "error", "repetition")'}),
    Need("vllm.v1.metrics.stats:PrefillStats", has="num_cached_tokens num_computed_tokens num_external_cached_tokens"),
    Need(
        "vllm.v1.metrics.stats:SchedulerStats",
        has="kv_cache_usage num_running_reqs num_skipped_waiting_reqs num_waiting_reqs prefix_cache_stats",
    ),
    Need("vllm.v1.metrics.stats:PrefixCacheStats", has="hits queries"),
    # The adapter unpacks these by position.
    Need("vllm.v1.outputs:LogprobsLists", call="logprob_token_ids logprobs sampled_token_ranks"),
    Need("vllm.v1.outputs:LogprobsTensors", call="logprob_token_ids logprobs selected_token_ranks"),
    Need(
        "vllm.sampling_params:SamplingParams",
        has="_bad_words_token_ids allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty "
        "ignore_eos include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n "
        "output_kind output_text_buffer_length presence_penalty prompt_logprobs repetition_penalty "
        "routed_experts_prompt_start seed skip_clone skip_special_tokens spaces_between_special_tokens stop "
        "stop_token_ids stream_interval temperature top_k top_p trace_decode_token_ids",
    ),
    Need("vllm.sampling_params:RequestOutputKind", has="CUMULATIVE"),
    Need("vllm.exceptions:VLLMClientError"),
    Need("vllm.exceptions:GracefulHTTPError"),
    Need("vllm.exceptions:VLLMValidationError", has="parameter"),
    Need("vllm.v1.engine.exceptions:EngineDeadError"),
    Need("vllm.v1.engine.output_processor:RequestOutputCollector", has="output", calls={"get": "", "get_nowait": ""}),
    Need("vllm.outputs:RequestOutput", has="finished kv_transfer_params num_cached_tokens outputs prompt_logprobs"),
    Need("vllm.outputs:CompletionOutput", has="finish_reason logprobs routed_experts stop_reason token_ids"),
    Need("vllm.logprobs:FlatLogprobs", has="end_indices logprobs start_indices token_ids"),
    # Weights and adapters in vLLM's worker processes.
    Need("vllm.lora.request:LoRARequest", call="lora_name lora_int_id lora_path * load_inplace"),
    Need("vllm.model_executor.model_loader:get_model_loader", call="load_config"),
    Need("vllm.model_executor.model_loader.default_loader:DefaultModelLoader", has="get_all_weights"),
    Need(
        "vllm.v1.worker.gpu_worker:Worker",
        has="_weight_update_active model_runner reload_weights weight_transfer_engine",
        calls=WORKER_CALLS,
    ),
    Need("vllm.v1.worker.cpu_worker:CPUWorker", has="model_runner reload_weights", calls=WORKER_CALLS),
    Need(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        has="device discard_request_mask input_batch kv_caches model_config sample_tokens",
        calls={"get_model": "", "reload_weights": "* weights_path"},
    ),
    Need("vllm.v1.worker.gpu_input_batch:InputBatch", has="generators num_reqs"),
    Need("vllm.v1.utils:CpuGpuBuffer", has="np"),
    Need(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        has="kv_caches model_config reload_weights",
        calls={"get_model": ""},
    ),
    Need("vllm.distributed.weight_transfer.base:WeightTransferEngine", calls={"reset_weight_update_target": ""}),
    Need("vllm.model_executor.model_loader.reload.layerwise:_place_kernel_tensors", call="layer info"),
    Need("vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info", call="layer"),
    Need("vllm.model_executor.model_loader.reload:layerwise"),
    Need("vllm.model_executor.model_loader.reload.layerwise:_layerwise_process", call="layer info"),
    Need("vllm.model_executor.model_loader.reload.layerwise", has="get_numel_loaded"),
    Need(
        "vllm.model_executor.model_loader.reload.layerwise:make_online_process_loader",
        call="layer param_name",
        reads={"": "def online_process_loader("},
    ),
    Need("vllm.model_executor.model_loader.reload.inplace", since=(0, 32)),
    Need("vllm.model_executor.model_loader.weight_utils:default_weight_loader"),
    Need(
        "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        has="kernel_tensors loaded_weights restore_device",
        calls={"can_load": "", "reset": ""},
    ),
    Need(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        has="is_monolithic moe_kernel topk_indices_dtype unquantized_backend",
        calls={
            "apply": "* layer x topk_weights topk_ids shared_experts shared_experts_input",
            "process_weights_after_loading": "layer",
        },
    ),
    Need("vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"),
    Need("vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig", has="use_all2all_kernels"),
    Need("vllm._custom_ops:causal_conv1d_weight_pack", call="weight"),
    Need("vllm.model_executor.layers.linear:LinearBase", has="quant_method"),
    Need(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        calls={"apply": "layer x bias", "process_weights_after_loading": "layer"},
    ),
    Need(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", has="quant_method shard_indices"
    ),
    Need("vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead"),
    Need(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        calls={"apply": "layer x bias", "embedding": "layer input_", "process_weights_after_loading": "layer"},
    ),
    Need("vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"),
    Need(
        "vllm.model_executor.layers.attention:MLAAttention",
        has="kv_b_proj kv_lora_rank num_heads qk_nope_head_dim v_head_dim",
    ),
    Need(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
        has="_forward_method",
        calls={"forward_cpu": "positions query key"},
    ),
    Need("vllm.model_executor.layers.attention:is_deferred_attention_layer", call="layer"),
    Need("vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend", has="CPU"),
    Need("vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel", has="fused_experts"),
    Need(
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts",
        calls={"process_weights_after_loading": "layer"},
    ),
    # KV transfer between engines.
    Need(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        has="_kv_transfer_config",
        call="* vllm_config role kv_cache_config",
        calls={"_get_connector_metadata": ""},
        overrides={
            "build_connector_meta": "scheduler_output",
            "get_block_ids_with_load_errors": "",
            "get_num_new_matched_tokens": "request num_computed_tokens",
            "register_kv_caches": "kv_caches",
            "request_finished": "request block_ids",
            "save_kv_layer": "layer_name kv_layer attn_metadata **kwargs",
            "shutdown": "",
            "start_load_kv": "forward_context **kwargs",
            "update_state_after_alloc": "request blocks num_external_tokens",
            "wait_for_layer_load": "layer_name",
            "wait_for_save": "",
        },
    ),
    Need("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata", call=""),
    Need("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole", has="SCHEDULER"),
    Need("vllm.distributed.parallel_state:get_pp_group", call=""),
    Need("vllm.distributed.parallel_state:get_tp_group", call=""),
    Need("vllm.distributed.parallel_state:GroupCoordinator", has="rank_in_group"),
    Need(
        "vllm.v1.request:Request",
        has="kv_transfer_params lora_request num_computed_tokens num_output_tokens num_preemptions num_prompt_tokens "
        "num_tokens request_id sampling_params skip_reading_prefix_cache status",
    ),
    Need("vllm.v1.request:RequestStatus", has="FINISHED_LENGTH_CAPPED"),
    Need("vllm.v1.core.kv_cache_manager:KVCacheBlocks", calls={"get_block_ids": ""}),
    Need("vllm.v1.kv_cache_interface:KVCacheConfig", has="num_blocks"),
    Need(
        "vllm.v1.core.sched.output:SchedulerOutput", has="num_scheduled_tokens scheduled_cached_reqs scheduled_new_reqs"
    ),
    Need("vllm.v1.core.sched.output:NewRequestData", has="num_computed_tokens req_id"),
    Need(
        "vllm.v1.core.sched.output:CachedRequestData", has="new_block_ids num_computed_tokens req_ids resumed_req_ids"
    ),
    Need("vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector", since=(0, 31)),
    Need(
        "vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector",
        has="_block_size",
        calls={"cap_external_hit": "request num_local num_external"},
        since=(0, 33),
    ),
)


MISSING: Any = object()


def check_loaded(needs: Iterable[Need]) -> list[str]:
    """Return the gaps of imported modules, one short text each; skip modules that are not imported."""
    return list(dict.fromkeys(gap for need in needs if _is_imported(need.module) for gap in _gaps(need)))


def _is_imported(name: str) -> bool:
    """Return True if the module is imported completely; the thread of another engine may still be importing it."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and not getattr(spec, "_initializing", False)


def _gaps(need: Need) -> Iterator[str]:
    if not need.name:
        return
    # `import_module` waits while another thread imports the module, which is incomplete until then.
    found: Any = getattr(importlib.import_module(need.module), need.name, MISSING)
    whole = f"{need.module}.{need.name}"
    if found is MISSING:
        yield f"{need.module} has no {need.name!r}"
        return
    if need.call is not None:
        yield from _call_gaps(whole, need.call, found)
    fields = _fields(found)
    if fields:
        members = fields | set(dir(found))
        yield from (f"{whole} has no {name!r}" for name in need.has.split() if name not in members)
    for name, call in need.calls.items():
        method = getattr(found, name, MISSING)
        if method is MISSING:
            yield f"{whole} has no method {name!r}"
        elif isinstance(inspect.getattr_static(found, name), staticmethod | classmethod):
            yield from _call_gaps(f"{whole}.{name}", call, method)
        else:
            # Skip self.
            yield from _call_gaps(f"{whole}.{name}", call, method, num_skipped=1)
    yield from (f"{whole} has no method {name!r}" for name in need.overrides if not hasattr(found, name))


def _fields(found: Any) -> set[str]:
    """Return the fields of a struct, a dataclass or a named tuple. Of other classes only the methods are known."""
    if not isinstance(found, type):
        return set()
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return {*getattr(found, "__struct_fields__", ()), *getattr(found, "_fields", ())}


def _call_gaps(whole: str, call: str, found: Callable[..., Any], *, num_skipped: int = 0) -> Iterator[str]:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        # The callable is a builtin or a replacement of a function.
        return
    kept = list(signature.parameters.values())[num_skipped:]
    gap = call_gap(call, signature.replace(parameters=kept))
    if gap:
        yield f"{whole} {gap}"


Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_HOPS = 16
"""Maximum number of imports to follow until a name is defined."""


@dataclass(frozen=True)
class _Place:
    """The place where a name is defined."""

    module: str
    node: ast.AST


class ModuleSources:
    """The modules below the folder of the package `vllm`; parses each module once.

    Args:
        folder: folder of the package.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, dict[str, ast.AST] | None] = {}

    def gaps(self, need: Need) -> Iterator[str]:
        """Yield the gaps of one need, one short text each."""
        names = self._names(need.module)
        if names is None:
            yield f"there is no module {need.module}"
            return
        if not need.name:
            yield from (f"{need.module} has no {name!r}" for name in need.has.split() if name not in names)
            return
        whole = f"{need.module}.{need.name}"
        place = self._find(need.module, need.name)
        if place is None:
            yield f"{need.module} has no {need.name!r}"
        elif isinstance(place.node, ast.ClassDef):
            yield from _Class(self, place).gaps(need, whole)
        elif need.call is not None and isinstance(place.node, Function):
            gap = call_gap(need.call, _signature(place.node))
            if gap:
                yield f"{whole} {gap}"
        elif need.has or need.calls or need.overrides:
            yield f"{whole} is not a class"
        elif need.reads and self.text(place.module, place.node).count(need.reads[""]) != 1:
            yield f"{whole} is not {need.reads['']}"

    def text(self, module: str, node: ast.AST) -> str:
        """Return the source of `node`."""
        path = self._path(module)
        return "" if path is None else ast.get_source_segment(path.read_text(), node) or ""

    def mro(self, place: _Place) -> list[_Place]:
        """Return a class and its base classes in vLLM, the class itself first."""
        node = place.node
        found = [place]
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                above = self._find(place.module, name.id)
                if above is not None and isinstance(above.node, ast.ClassDef):
                    found += self.mro(above)
        return found

    def _find(self, module: str, name: str) -> _Place | None:
        for _ in range(MAX_HOPS):
            names = self._names(module)
            node = None if names is None else names.get(name)
            if node is None:
                is_module = self._path(f"{module}.{name}") is not None
                return _Place(f"{module}.{name}", ast.Module([], [])) if is_module else None
            if not isinstance(node, ast.ImportFrom):
                return _Place(module, node)
            source = self._absolute(module, node)
            if not source.startswith("vllm"):
                return _Place(source, node)
            name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            module = source
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        parts = module.split(".")
        up = node.level - (path is not None and path.name == "__init__.py")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def _path(self, module: str) -> Path | None:
        plain = self._folder.joinpath(*module.split(".")[1:])
        candidates = (plain / "__init__.py", plain.with_suffix(".py"))
        return next((path for path in candidates if path.is_file()), None)

    def _names(self, module: str) -> dict[str, ast.AST] | None:
        """Return the names bound at the top level of a module, also under conditions."""
        if module not in self._modules:
            path = self._path(module)
            self._modules[module] = None if path is None else dict(_bound(ast.parse(path.read_text()).body))
        return self._modules[module]


class _Class:
    """One class with the members that it inherits from other classes of vLLM."""

    def __init__(self, sources: ModuleSources, place: _Place) -> None:
        self._sources = sources
        self._mro = sources.mro(place)

    def gaps(self, need: Need, whole: str) -> Iterator[str]:
        members = self._members
        yield from (f"{whole} has no {name!r}" for name in need.has.split() if name not in members)
        if need.call is not None:
            gap = call_gap(need.call, self._constructor())
            if gap:
                yield f"{whole} {gap}"
        for name, call in need.calls.items():
            yield from self._method_gaps(whole, name, call)
        for name, parameters in need.overrides.items():
            method = self._method(name)
            gap = "does not exist" if method is None else override_gap(parameters, _signature(method, is_method=True))
            if gap:
                yield f"{whole}.{name} {gap}"
        if need.overrides:
            abstract = {name for place in self._mro for name, node in _functions(place.node) if _is_abstract(node)}
            yield from (
                f"{whole} has the abstract method {name!r}, which the adapter does not implement"
                for name in sorted(abstract - {*need.overrides})
            )
        for name, text in need.reads.items():
            method = self._method(name)
            source = "" if method is None else self._sources.text(self._owner(method), method)
            if source.count(text) != 1:
                yield f"{whole}.{name} does not contain {text!r} exactly once"

    def _method_gaps(self, whole: str, name: str, call: str) -> Iterator[str]:
        method = self._method(name)
        if method is None:
            yield f"{whole} has no method {name!r}"
            return
        gap = call_gap(call, _signature(method, is_method=True))
        if gap:
            yield f"{whole}.{name} {gap}"

    @functools.cached_property
    def _members(self) -> set[str]:
        found: set[str] = set()
        for place in self._mro:
            for node in ast.walk(place.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    found.add(node.attr)
            if isinstance(place.node, ast.ClassDef):
                found.update(name for name, _ in _bound(place.node.body))
        return found

    def _method(self, name: str) -> Function | None:
        # The last of several definitions in one class counts: the earlier ones are overloads for type checkers.
        defined = (dict(_functions(place.node)).get(name) for place in self._mro)
        return next((node for node in defined if node is not None), None)

    def _owner(self, method: Function) -> str:
        return next(place.module for place in self._mro if method in ast.walk(place.node))

    def _constructor(self) -> inspect.Signature:
        method = self._method("__init__")
        if method is not None:
            return _signature(method, is_method=True)
        # Fields of a dataclass, a struct or a named tuple: inherited fields come first.
        fields: dict[str, inspect.Parameter] = {}
        for place in reversed(self._mro):
            for node in place.node.body if isinstance(place.node, ast.ClassDef) else ():
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_class_var(node):
                    default = inspect.Parameter.empty if node.value is None else None
                    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                    fields[node.target.id] = inspect.Parameter(node.target.id, kind, default=default)
        # A struct may have fields without a default after fields with one. `Signature` rejects that order, so sort
        # them.
        return inspect.Signature(sorted(fields.values(), key=lambda one: one.default is None))


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((name.id, node) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        else:
            for blocks in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, blocks, ()):
                    yield from _bound(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _functions(node: ast.AST) -> Iterator[tuple[str, Function]]:
    for name, found in _bound(node.body) if isinstance(node, ast.ClassDef) else ():
        if isinstance(found, Function):
            yield name, found


def _is_abstract(function: Function) -> bool:
    return any(isinstance(name, ast.Name) and name.id == "abstractmethod" for name in function.decorator_list)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_class_var(node: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(node.annotation)


def _signature(function: Function, *, is_method: bool = False) -> inspect.Signature:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    num_required = len(positional) - len(given.defaults)
    kinds = inspect.Parameter
    parameters = []
    for index, argument in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if index < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        default = kinds.empty if index < num_required else None
        parameters.append(kinds(argument.arg, kind, default=default))
    if given.vararg is not None:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if value is None else None))
    if given.kwarg is not None:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    is_static = any(isinstance(name, ast.Name) and name.id == "staticmethod" for name in function.decorator_list)
    return inspect.Signature(parameters[is_method and not is_static :])


READING = threading.Lock()
"""Lock for parsing sources. Engines that start at the same time in one process parse in threads. In Python 3.11, two
parsing threads may fail with SystemError "AST constructor recursion depth mismatch"."""
MAX_NAMED = 12
"""Maximum number of gaps in a message."""


def release_in(folder: Path) -> str:
    """Return the release of the sources in the folder `vllm`, from their own version file.

    Raises:
        EngineDead: the file is missing or does not state the release.
    """
    try:
        text = (folder / "_version.py").read_text()
    except OSError as exc:
        raise EngineDead(f"{folder} does not state its vLLM release: {exc}") from exc
    found = re.search(r"""^(?:__version__ = )?version = ["']([^"']+)["']""", text, re.MULTILINE)
    if found is None:
        raise EngineDead(f"{folder / '_version.py'} does not state its vLLM release")
    return found[1]


def needs_of(release: str) -> list[Need]:
    """Return the needs of this release; a release newer than the contract has the needs of the newest known release."""
    return [need for need in CONTRACT if need.since <= _numbers(release) < need.until]


def find_gaps(folder: Path) -> tuple[str, ...]:
    """Return the gaps between the sources in the folder `vllm` and the contract, one short text each. Cached."""
    with READING:
        return _find_gaps(folder)


@functools.lru_cache(maxsize=1)
def _find_gaps(folder: Path) -> tuple[str, ...]:
    sources = ModuleSources(folder)
    return tuple(dict.fromkeys(gap for need in needs_of(release_in(folder)) for gap in sources.gaps(need)))


def check() -> None:
    """Compare the sources and the imported modules of the installed vLLM with the contract.

    Raises:
        EngineDead: vLLM is not installed or has gaps; the message names the release and the gaps.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineDead(f"vLLM is not installed: {pip_install('worker')}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    release = release_in(folder)
    if _numbers(release) < FIRST:
        raise EngineDead(f"vLLM {release} is too old for the rollbus worker; {_allowed()}")
    if _numbers(release) >= PAST:
        logger.warning("engine.unverified_release_detected release=%s proven=%r", release, _proven())
    gaps = find_gaps(folder) or check_loaded(needs_of(release))
    if gaps:
        named = "; ".join(gaps[:MAX_NAMED])
        more = f"; and {len(gaps) - MAX_NAMED} more" if len(gaps) > MAX_NAMED else ""
        raise EngineDead(f"vLLM {release} lacks parts that the rollbus worker uses: {named}{more}; {_allowed()}")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def _allowed() -> str:
    return f"allowed: {_proven()}, as released"


def _proven() -> str:
    return f"{FIRST[0]}.{FIRST[1]} to {PAST[0]}.{PAST[1] - 1}"
