"""Starts vLLM: its environment, arguments and processes. All functions here block and run in a thread.

Whether an engine returns routed experts depends on the release of vLLM, the device and the other arguments. If it
returns none, the reason is told.
"""

import dataclasses
import logging
import multiprocessing
import os
import secrets
import threading
from collections.abc import Mapping
from importlib.resources import files
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....bus.logs import is_json
from ....schemas.decoding import nearest
from ....schemas.errors import EngineDead, ForeignError, foreign_code
from ....schemas.options import pip_install
from . import plugin
from .extension import extension_name
from .kv.config import FIELD as KV_FIELD
from .kv.config import connector_refusal
from .names import check_names
from .processes import begin_preload, compute_in_core, fork_from_server, kill, own_executor, without_collection

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


ARGUMENT = "enable_return_routed_experts"
"""The engine argument that enables routed experts."""
AUX_OUTPUT = "aux_output_config"
"""Field of `VllmConfig` and of the engine arguments since 0.31. It contains the flag that 0.30 has in `ModelConfig`."""
VLLM_REFUSALS = ("AuxOutput Connector", "--enable-return-routed-experts")
"""Parts of vLLM's messages that reject routed experts (config/vllm.py: _verify_aux_output_compatibility)."""
OWN_SLOTS = 1
"""Requests that the engine runs beyond `max_num_seqs`, so that the worker's own request has a slot in a full batch."""
CPU_KV_CACHE_BYTES = 1 << 30
"""Default KV cache size on a CPU. vLLM's own default is a share of the whole machine, so a second worker on the machine
does not start (v1/worker/cpu_worker.py: __init__). Set another size with `kv_cache_memory_bytes`,
`gpu_memory_utilization` or `VLLM_CPU_KVCACHE_SPACE`."""
KV_CACHE_ARGS = ("kv_cache_memory_bytes", "gpu_memory_utilization")
CPU_KV_BLOCK_TOKENS = 32
"""Only whole blocks of KV are transferred. A short prompt does not fill a block of vLLM's default of 128 tokens."""
GRAMMARS = "structured_outputs_config"
GRAMMAR_BACKEND = "xgrammar"
CPU_UNUSED_LORAS = 1
"""Adapter slots that stay empty. On a CPU, vLLM adds the adapter in the last slot to every request without an adapter
(lora/ops/torch_ops/lora_ops.py uses -1, which means none, as an index)."""
JSON_LOGS = Path(str(files(__package__))) / "json_logs.json"
"""vLLM's logging configuration if this process logs JSON. This process and each vLLM process read it."""
LARGEST_THAT_FITS = -1
"""Value of `max_model_len`: the model's own maximum, or less if the KV cache holds less."""


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


class Launch:
    """One attempt to start an engine.

    Args:
        model: folder of the checkpoint, or any other value that vLLM accepts.
        engine_args: fields of vLLM's `AsyncEngineArgs`.
        log_level: level of vLLM's own logs, which go to stderr; None: `VLLM_LOGGING_LEVEL`, or WARNING if it is not
            set.
    """

    def __init__(self, model: str, engine_args: Mapping[str, Any], log_level: str | None) -> None:
        self._model = model
        self._engine_args = engine_args
        self._log_level = log_level
        self._is_cancelled = threading.Event()
        self._other_children: frozenset[BaseProcess] | None = None
        """Children of this process when the start of vLLM began; None while no start runs."""
        self._llm: AsyncLLM | None = None

    def run(self) -> None:
        """Start the engine and store it in `llm`. This takes as long as loading the model.

        Call this outside of an event loop's thread, so that `AsyncLLM` starts no task of its own. The function returns
        nothing, because the thread would keep a reference to the result, and an unclosed `AsyncLLM` logs an error at
        interpreter exit.

        Raises:
            EngineDead: vLLM did not start, lacks names that the worker uses, or `cancel` was called; the message gives
                the reason.
        """
        set_environment(self._model, self._log_level)
        begin_preload()
        try:
            with foreign_code(EngineDead, ImportError):
                self._start()
        except ImportError as exc:
            raise EngineDead(f"vLLM cannot be imported ({exc}); {pip_install('worker')}") from exc
        except ForeignError as exc:
            self._check_not_cancelled()
            # For the worker, every error of vLLM, of torch or of a broken checkpoint means the same: the start failed.
            message = f"vLLM did not start with {self._model}: {exc} (see its log on stderr)"
            raise EngineDead(message) from exc
        finally:
            self._other_children = None

    def _start(self) -> None:
        with without_collection():
            check_names()
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.executor import Executor

            self._check_not_cancelled()
            # vLLM does not load the plugin itself if `VLLM_PLUGINS` omits it.
            plugin.install()
            self._other_children = frozenset(multiprocessing.active_children())
            with fork_from_server():
                args = engine_arguments(self._model, self._engine_args)
                config = engine_config(args)
            config.scheduler_config.max_num_seqs += OWN_SLOTS
            self._check_not_cancelled()
        cores = compute_in_core(args, config)
        executor = own_executor(Executor.get_class(config), cores)
        with fork_from_server():
            self._llm = AsyncLLM(config, executor, log_stats=not args.disable_log_stats)

    def cancel(self) -> None:
        """End `run` soon. Repeat the call until `run` has ended, because vLLM may be about to start a process."""
        self._is_cancelled.set()
        others = self._other_children
        if others is not None:
            for process in set(multiprocessing.active_children()) - others:
                kill(process)

    @property
    def llm(self) -> "AsyncLLM":
        """The engine that `run` has started."""
        if self._llm is None:
            raise EngineDead("vLLM has not been started")
        return self._llm

    def pop_llm(self) -> "AsyncLLM | None":
        """Return the engine that `run` has started and clear it. The caller owns the engine and shuts it down."""
        llm, self._llm = self._llm, None
        return llm

    def _check_not_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise EngineDead("the engine was closed during its start")


def set_environment(model: str, log_level: str | None) -> None:
    """Set the environment variables of vLLM and its processes; call this before vllm is first imported."""
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    if log_level is not None:
        os.environ["VLLM_LOGGING_LEVEL"] = log_level
    if is_json():
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(JSON_LOGS))
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # Silence torch's C++ warnings about the machine's memory layout.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if Path(model).is_dir():
        # The whole model is local, so vLLM must not wait for a server that may be unreachable.
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_arguments(model: str, given: Mapping[str, Any]) -> "AsyncEngineArgs":
    """Return the arguments for vLLM: the given arguments, and defaults for a worker.

    Raises:
        EngineDead: vLLM does not know an argument, or the worker sets it itself.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    _check_names(given, known)
    defaults: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs",
        # The steps then contain the engine's load, which the worker publishes in its presence.
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        # With one seed for all engines, as by vLLM's default, workers sample equal answers to one prompt. Processes on
        # other machines are started elsewhere and need vLLM's default too.
        "seed": secrets.randbits(31) if given.get("nnodes", 1) == 1 else 0,
    }
    if current_platform.is_cpu():
        defaults |= {"enforce_eager": True, "max_model_len": LARGEST_THAT_FITS}
        if given.get(KV_FIELD) is not None:
            defaults["block_size"] = CPU_KV_BLOCK_TOKENS
        if not any(name in given for name in KV_CACHE_ARGS) and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if "worker_extension_cls" in known:
        defaults["worker_extension_cls"] = extension_name(None)
    chosen = {"model": model} | {name: value for name, value in defaults.items() if name in known} | dict(given)
    if given.get("worker_extension_cls"):
        chosen["worker_extension_cls"] = extension_name(given["worker_extension_cls"])
    if given.get(KV_FIELD) is not None:
        chosen[KV_FIELD] = _config(KVTransferConfig, KV_FIELD, given[KV_FIELD])
    # Read the model's configuration alone, before any weights are loaded.
    model_config = AsyncEngineArgs(**chosen).create_model_config()
    has_experts = bool(model_config.get_num_experts())
    # Set the flag before the final arguments are created: vLLM 0.31 and later copy it at that time.
    chosen[ARGUMENT] = _choose_routing(given, has_experts=has_experts)
    chosen[GRAMMARS] = _grammar_config(given.get(GRAMMARS))
    args = AsyncEngineArgs(**chosen)
    if has_experts and args.data_parallel_size > 1:
        raise EngineDead(
            f"engine argument 'data_parallel_size' is {args.data_parallel_size}: replicas of a model with experts run "
            "their steps together, which vLLM does not support on a CPU and which is untested elsewhere: a pause or an "
            "update may deadlock; allowed: 1, with one worker for each replica"
        )
    if chosen[ARGUMENT]:
        _check_kv_with_routing(args)
    if current_platform.is_cpu() and args.enable_lora:
        if has_experts:
            # vLLM starts with this combination and dies at the first request.
            raise EngineDead(
                "engine argument 'enable_lora': on a CPU vLLM does not support adapters for models with experts"
            )
        args.max_loras += CPU_UNUSED_LORAS
        if args.max_cpu_loras is not None:
            args.max_cpu_loras = max(args.max_cpu_loras, args.max_loras)
    block_size = given.get("block_size")
    if current_platform.is_cpu() and isinstance(block_size, int) and block_size % 32 and not model_config.use_mla:
        raise EngineDead(f"engine argument 'block_size' is {block_size}; allowed on a CPU: multiples of 32")
    return args


def engine_config(args: "AsyncEngineArgs") -> "VllmConfig":
    """Return vLLM's configuration for these arguments.

    Raises:
        EngineDead: vLLM cannot return routed experts with the other arguments.
    """
    try:
        return args.create_engine_config()
    except ValueError as exc:
        if not any(text in str(exc) for text in VLLM_REFUSALS):
            raise
        raise EngineDead(
            f"vLLM cannot return routed experts with these engine arguments: {exc}. "
            f"The engine argument '{ARGUMENT}': false starts the engine without routed experts"
        ) from exc


def _choose_routing(given: Mapping[str, Any], *, has_experts: bool) -> bool:
    refusal = cpu_refusal()
    chosen = given.get(ARGUMENT)
    if chosen is None:
        if has_experts and refusal is not None:
            logger.warning("engine.routed_experts_disabled reason=%s", refusal)
        return has_experts and refusal is None
    if chosen and refusal is not None:
        raise EngineDead(f"engine argument '{ARGUMENT}' is true, but {refusal}; allowed here: false")
    return bool(chosen)


def _grammar_config(given: Any) -> Any:
    """Return the configuration of structured outputs, with a fixed backend.

    With vLLM's default `auto`, the first request with a grammar selects the backend. Later requests that pass vLLM's
    checks for another backend fail in the engine.
    """
    from vllm.config import StructuredOutputsConfig

    chosen = {"backend": GRAMMAR_BACKEND} | dict(given or {})
    if chosen["backend"] == "auto":
        raise EngineDead(
            f"engine argument '{GRAMMARS}.backend' is 'auto': the first request would select the backend for all later "
            f"requests; allowed: {GRAMMAR_BACKEND} (the default), guidance, outlines, lm-format-enforcer"
        )
    return _config(StructuredOutputsConfig, GRAMMARS, chosen)


def _config(kind: type[Any], argument: str, given: Mapping[str, Any]) -> Any:
    """Return the engine argument `argument`, a configuration of the class `kind` of vLLM."""
    from pydantic import ValidationError

    known = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        _check_known(name, known, f"'{argument}.{name}'")
    try:
        return kind(**given)
    except ValidationError as exc:
        problems = [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in exc.errors()]
        raise EngineDead(f"engine argument '{argument}' is rejected by vLLM: {'; '.join(problems)}") from exc


def _check_kv_with_routing(args: "AsyncEngineArgs") -> None:
    if getattr(args, "kv_offloading_size", None) is not None:
        # vLLM creates an offloading connector from this argument, but only after it has checked for a connector.
        raise EngineDead(
            "engine argument 'kv_offloading_size': vLLM would restore KV of prompt tokens with unknown routed experts; "
            "allowed with routed experts: none, or the engine argument 'enable_return_routed_experts': false"
        )
    refusal = connector_refusal(args.kv_transfer_config)
    if refusal is not None:
        raise EngineDead(f"engine argument '{KV_FIELD}': {refusal}")


def _check_names(given: Mapping[str, Any], known: set[str]) -> None:
    for name in given:
        if name == "model":
            raise EngineDead("engine argument 'model': pass the model separately, not as an engine argument")
        _check_known(name, known, repr(name))
    mode = given.get("logprobs_mode", "processed_logprobs")
    if not str(mode).endswith("_logprobs"):
        raise EngineDead(f"engine argument 'logprobs_mode' is {mode!r}; allowed: processed_logprobs, raw_logprobs")


def _check_known(name: str, known: set[str], shown: str) -> None:
    if name not in known:
        raise EngineDead(f"engine argument {shown} is unknown to vLLM{nearest(name, known)}")
