"""The contract with vLLM: every name, field and signature that the adapter uses, and the releases that have it.

`sources` compares it with the sources of a release. It must list everything that `workers/engines/vllm` imports from
vLLM or uses of its objects, and lists what the HTTP service uses of the parsers; tests/engine/test_contract.py finds
entries that are missing. An engine that starts checks only the names that its worker's own process uses
(`workers/engines/vllm/names.py`).
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from rollbus.workers.engines.vllm.names import FIRST, NAMES


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


WORKER_CALLS = {
    "add_lora": "lora_request",
    "init_weight_transfer_engine": "init_info",
    "start_weight_update": "",
    "update_weights": "update_info",
    "finish_weight_update": "",
    "get_model": "",
}
OTHERS: tuple[Need, ...] = (
    # Start of an engine.
    Need("vllm.engine.arg_utils:AsyncEngineArgs", calls={"create_engine_config": "", "create_model_config": ""}),
    Need("vllm.platforms.interface:Platform", calls={"is_cpu": "", "get_device_name": ""}),
    Need("vllm.v1.executor:Executor", calls={"get_class": "vllm_config"}),
    Need("vllm.utils.import_utils:resolve_obj_by_qualname", call="qualname"),
    Need("vllm.utils.ompmultiprocessing:OMPProcessManager", has="cpu_lists", call="config"),
    Need("vllm.v1.engine.utils:get_mp_context", call=""),
    Need("vllm.model_executor.models.registry:_run_in_subprocess"),
    Need("vllm.plugins:load_general_plugins", call=""),
    Need("vllm.v1.engine.core"),
    Need("vllm.v1.executor.uniproc_executor"),
    # The engine alone and vLLM's own server, with which `rollbus prove` compares a fleet.
    Need("vllm.sampling_params:RequestOutputKind", has="DELTA"),
    Need("vllm.entrypoints.openai.api_server"),
    # The parsers of answers, which the HTTP service uses.
    Need(
        "vllm.parser:ParserManager",
        calls={"get_parser": "* tool_parser_name reasoning_parser_name enable_auto_tools is_harmony"},
    ),
    Need(
        "vllm.parser.abstract_parser:Parser",
        has="reasoning_parser",
        calls={
            "adjust_request": "request",
            "is_reasoning_end": "input_ids",
            "parse": "model_output request * enable_auto_tools model_output_token_ids",
            "parse_delta": "delta_text delta_token_ids request * prompt_token_ids finished",
        },
    ),
    *(
        Need(where, calls={"extract_reasoning": "model_output request"})
        for where in ("vllm.parser.abstract_parser:DelegatingParser", "vllm.parser.engine.parser_engine:ParserEngine")
    ),
    # The memory of GPUs, for a worker that is lent.
    Need("vllm.third_party.pynvml"),
    # Configuration of the engine.
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
        "vllm.v1.worker.gpu.sample.logit_bias",
        has="MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS MAX_NUM_STOP_TOKEN_IDS",
    ),
    # Requests into the engine, and outputs of the engine.
    Need(
        "vllm.v1.engine.async_llm:AsyncLLM",
        call="vllm_config executor_class * log_stats",
        calls={
            "generate": "prompt sampling_params request_id",
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
        calls={
            "abort_requests_async": "request_ids",
            "add_request_async": "request",
            "pause_scheduler_async": "* mode clear_cache",
            "resume_scheduler_async": "",
            "_call_utility_async": "method args * engine",
            "call_utility_async": "method args",
        },
    ),
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
        has="prev_step_scheduled_req_ids requests running waiting",
        calls={
            "_preempt_request": "request timestamp",
            "add_request": "request",
            "schedule": "throttle_prefills",
            "update_from_output": "scheduler_output model_runner_output",
        },
    ),
    Need(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        calls={"prepend_request": "request", "remove_request": "request"},
    ),
    Need("vllm.v1.engine:EngineCoreEvent", call="type timestamp"),
    Need(
        "vllm.v1.engine.input_processor:InputProcessor",
        calls={"process_inputs": "request_id prompt params supported_tasks * lora_request priority trace_headers"},
    ),
    Need("vllm.inputs.engine:tokens_input", call="prompt_token_ids * cache_salt"),
    Need("vllm.v1.engine:EngineCoreOutput", call="request_id new_token_ids * finish_reason"),
    Need("vllm.v1.engine:EngineCoreOutput", has="error", since=(0, 33)),
    Need("vllm.outputs:RequestError", has="message", since=(0, 33)),
    Need("vllm.v1.engine:EngineCoreOutputs", call="* outputs"),
    # `rollbus.schemas.chunk.FinishReason` has a value for each of these.
    Need("vllm.v1.engine:FINISH_REASON_STRINGS", reads={"": '("stop", "length", "abort", "error", "repetition")'}),
    # The adapter unpacks these by position.
    Need("vllm.utils.torch_utils:set_random_seed", call="seed"),
    Need("vllm.v1.sample.sampler:batched_count_greater_than", call="x values"),
    Need("vllm.v1.sample.ops.topk_topp_sampler:compiled_random_sample", call="logits", until=(0, 33)),
    Need("vllm.v1.outputs:LogprobsLists", call="logprob_token_ids logprobs sampled_token_ranks"),
    Need("vllm.v1.outputs:LogprobsTensors", call="logprob_token_ids logprobs selected_token_ranks"),
    Need("vllm.exceptions:VLLMValidationError", has="parameter"),
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
        has="device discard_request_mask input_batch kv_caches model_config parallel_config sample_tokens",
        calls={"get_model": "", "reload_weights": "* weights_path"},
    ),
    Need("vllm.v1.worker.gpu_input_batch:InputBatch", has="generators num_reqs"),
    Need("vllm.v1.utils:CpuGpuBuffer", has="np"),
    Need(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        has="kv_caches model_config parallel_config reload_weights",
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
"""What a start does not check: arguments, texts, names of some releases, and what runs in other processes."""


def _checked() -> Iterator[Need]:
    """Yield what a start checks, without the methods whose arguments are in `OTHERS`."""
    called = {(need.where, name) for need in OTHERS for name in need.calls}
    for where, names in NAMES.items():
        if ":" in where or where == "vllm.envs":
            yield Need(where, has=" ".join(name for name in names.split() if (where, name) not in called))
        else:
            yield from (Need(f"{where}:{name}") for name in names.split())


CONTRACT: tuple[Need, ...] = (*_checked(), *OTHERS)
