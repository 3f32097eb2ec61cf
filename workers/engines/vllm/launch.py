"""Start vLLM: its environment, its arguments, its processes. Everything here blocks and runs in a thread."""

import atexit
import contextlib
import dataclasses
import difflib
import gc
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from importlib.resources import files
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....bus.logs import is_json
from ....schemas.errors import EngineDead
from ....schemas.foreign_code import ForeignError, foreign_code
from . import plugin
from .contract_check import check as check_contract
from .cores import compute_in_core
from .extension import extension_name
from .kv.config import FIELD as KV_FIELD
from .kv.config import routing_refusal
from .ownership import kill, owned_executor
from .preload import begin_preload, forked_cores
from .routing import ARGUMENT as ROUTING
from .routing import cpu_refusal, vllm_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["CPU_UNUSED_LORAS", "OWN_SLOTS", "Launch"]

logger = logging.getLogger(__name__)

OWN_SLOTS = 1
"""Requests that the engine runs beyond `max_num_seqs`: the worker's own one finds room while the batch is full."""

CPU_KV_CACHE_BYTES = 1 << 30
"""vLLM's own default is a share of the whole machine, so that a second worker beside the first does not start
(v1/worker/cpu_worker.py: __init__). More with `kv_cache_memory_bytes`, `gpu_memory_utilization` or vLLM's variable."""
KV_CACHE_ARGS = ("kv_cache_memory_bytes", "gpu_memory_utilization")
CPU_KV_BLOCK_TOKENS = 32
"""KV goes to other engines in whole blocks; of vLLM's own, of 128 tokens, a short prompt fills none."""
CPU_UNUSED_LORAS = 1
"""Places for adapters that stay empty: on a CPU vLLM adds what is in the last one to every request without an adapter
(lora/ops/torch_ops/lora_ops.py takes -1, which means none, for an index)."""
JSON_LOGS = Path(str(files(__package__))) / "json_logs.json"
"""How vLLM logs where this process logs JSON: here and in its processes, each of which reads it."""
LARGEST_THAT_FITS = -1
"""As `max_model_len`: the model's own, or as much of it as the KV cache holds."""


class Launch:
    """One attempt to start an engine.

    Args:
        model: folder of the checkpoint, or whatever else vLLM takes.
        engine_args: fields of vLLM's `AsyncEngineArgs`.
        log_level: of vLLM's own logs, which go to stderr; None: `VLLM_LOGGING_LEVEL`, else warnings.
    """

    def __init__(self, model: str, engine_args: Mapping[str, Any], log_level: str | None) -> None:
        self._model = model
        self._engine_args = engine_args
        self._log_level = log_level
        self._is_cancelled = threading.Event()
        self._other_children: frozenset[BaseProcess] | None = None
        """This process's children when vLLM began to start; None when it does not."""
        self._llm: AsyncLLM | None = None

    def run(self) -> None:
        """Start the engine, which is then in `llm`; takes as long as loading the model does.

        Called outside of an event loop's thread, so that `AsyncLLM` starts no task of its own. Returns nothing, as
        the thread would hold on to it, and a forgotten `AsyncLLM` complains when the interpreter ends.

        Raises:
            EngineDead: it did not start, this vLLM lacks something, or `cancel` was called; the message says why.
        """
        set_environment(self._model, self._log_level)
        check_contract()
        begin_preload()
        try:
            with foreign_code(EngineDead, ImportError):
                self._start()
        except ImportError as exc:
            raise EngineDead(f"vLLM cannot be imported ({exc}); it comes with rollbus[worker]") from exc
        except ForeignError as exc:
            self._check_not_cancelled()
            # Every error of vLLM, of torch or for a broken checkpoint means the same to the worker at start-up.
            message = f"vLLM did not start with {self._model}: {exc} (its log on stderr says more)"
            raise EngineDead(message) from exc
        finally:
            self._other_children = None

    def _start(self) -> None:
        with _without_collection():
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.executor import Executor

            check_contract()
            self._check_not_cancelled()
            # Where `VLLM_PLUGINS` leaves it out, vLLM does not load it by itself.
            plugin.install()
            args = engine_arguments(self._model, self._engine_args)
            config = engine_config(args)
            config.scheduler_config.max_num_seqs += OWN_SLOTS
            self._check_not_cancelled()
        cores = compute_in_core(args, config)
        executor = owned_executor(Executor.get_class(config), cores)
        self._other_children = frozenset(multiprocessing.active_children())
        with forked_cores():
            self._llm = AsyncLLM(config, executor, log_stats=not args.disable_log_stats)

    def cancel(self) -> None:
        """Make `run` end soon, if it has not. Called again until it has: vLLM may be about to start a process."""
        self._is_cancelled.set()
        others = self._other_children
        if others is not None:
            for process in set(multiprocessing.active_children()) - others:
                kill(process)

    @property
    def llm(self) -> "AsyncLLM":
        """What `run` has started."""
        if self._llm is None:
            raise EngineDead("vLLM has not been started")
        return self._llm

    def pop_llm(self) -> "AsyncLLM | None":
        """What `run` has started, once: it belongs to the caller, who shuts it down."""
        llm, self._llm = self._llm, None
        return llm

    def _check_not_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise EngineDead("the engine was closed while it started")


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Import vLLM and torch in this block: a million objects, which the garbage collector then leaves alone.

    It would look through all of them several times meanwhile, in each full collection later, during which the event
    loop stands still, and once more when the process ends: seconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
        atexit.register(gc.freeze)


def set_environment(model: str, log_level: str | None) -> None:
    """Set what vLLM reads from the environment, here and in its processes; only before vllm is first imported."""
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    if log_level is not None:
        os.environ["VLLM_LOGGING_LEVEL"] = log_level
    if is_json():
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(JSON_LOGS))
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # Torch's C++ warnings about the machine's memory layout.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if Path(model).is_dir():
        # All of the model is here, and nothing should wait for a server that may not be reachable.
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_arguments(model: str, given: Mapping[str, Any]) -> "AsyncEngineArgs":
    """The arguments for vLLM: what was given, and where nothing was, what suits a worker.

    Raises:
        EngineDead: an argument that vLLM does not know, or that the worker sets itself.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    _check_names(given, known)
    defaults: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs",
        # What the worker announces of the engine's load comes with its steps then.
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
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
        chosen[KV_FIELD] = _kv_transfer_config(given[KV_FIELD])
    # The model's configuration alone, before any weights are loaded.
    model_config = AsyncEngineArgs(**chosen).create_model_config()
    has_experts = bool(model_config.get_num_experts())
    # Before the arguments are made for good: vLLM 0.31 and later copy the flag when they are.
    chosen[ROUTING] = _chosen_routing(given, has_experts=has_experts)
    args = AsyncEngineArgs(**chosen)
    if has_experts and args.data_parallel_size > 1:
        raise EngineDead(
            f"engine argument 'data_parallel_size' is {args.data_parallel_size}: replicas of a model with experts "
            "compute in step with each other, on a CPU vLLM cannot do that, and elsewhere it is not known whether they "
            "pause and update without a deadlock; allowed: 1, and one worker for each replica"
        )
    if chosen[ROUTING]:
        _check_kv_with_routing(args)
    if current_platform.is_cpu() and args.enable_lora:
        if has_experts:
            # vLLM starts, and dies of the first request.
            raise EngineDead("engine argument 'enable_lora': on a CPU vLLM has no adapters for models with experts")
        args.max_loras += CPU_UNUSED_LORAS
        if args.max_cpu_loras is not None:
            args.max_cpu_loras = max(args.max_cpu_loras, args.max_loras)
    block_size = given.get("block_size")
    if current_platform.is_cpu() and isinstance(block_size, int) and block_size % 32 and not model_config.use_mla:
        raise EngineDead(f"engine argument 'block_size' is {block_size}; allowed on a CPU: multiples of 32")
    return args


def engine_config(args: "AsyncEngineArgs") -> "VllmConfig":
    """What vLLM makes of its arguments.

    Raises:
        EngineDead: vLLM cannot return routed experts with the other arguments.
    """
    try:
        return args.create_engine_config()
    except ValueError as exc:
        refusal = vllm_refusal(exc)
        if refusal is None:
            raise
        raise EngineDead(refusal) from exc


def _chosen_routing(given: Mapping[str, Any], *, has_experts: bool) -> bool:
    refusal = cpu_refusal()
    chosen = given.get(ROUTING)
    if chosen is None:
        if has_experts and refusal is not None:
            logger.warning("engine.routing_turned_off reason=%s", refusal)
        return has_experts and refusal is None
    if chosen and refusal is not None:
        raise EngineDead(f"engine argument '{ROUTING}' is true, but {refusal}; allowed here: false")
    return bool(chosen)


def _kv_transfer_config(given: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError
    from vllm.config import KVTransferConfig

    known = {field.name for field in dataclasses.fields(KVTransferConfig)}
    for name in given:
        _check_known(name, known, f"'{KV_FIELD}.{name}'")
    try:
        return KVTransferConfig(**given)
    except ValidationError as exc:
        problems = [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in exc.errors()]
        raise EngineDead(f"engine argument '{KV_FIELD}' was refused by vLLM: {'; '.join(problems)}") from exc


def _check_kv_with_routing(args: "AsyncEngineArgs") -> None:
    if getattr(args, "kv_offloading_size", None) is not None:
        # vLLM makes an offloading connector of it, but only after it has looked for one.
        raise EngineDead(
            "engine argument 'kv_offloading_size': brings back KV of prompt tokens whose experts are unknown then; "
            "allowed with routed experts: none, or the engine argument 'enable_return_routed_experts': false"
        )
    refusal = routing_refusal(args.kv_transfer_config)
    if refusal is not None:
        raise EngineDead(f"engine argument '{KV_FIELD}': {refusal}")


def _check_names(given: Mapping[str, Any], known: set[str]) -> None:
    for name in given:
        if name == "model":
            raise EngineDead("engine argument 'model': the model is given by itself, not among the engine's arguments")
        _check_known(name, known, repr(name))
    mode = given.get("logprobs_mode", "processed_logprobs")
    if not str(mode).endswith("_logprobs"):
        raise EngineDead(f"engine argument 'logprobs_mode' is {mode!r}; allowed: processed_logprobs, raw_logprobs")


def _check_known(name: str, known: set[str], shown: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise EngineDead(f"engine argument {shown} is unknown to vLLM{hint}")
