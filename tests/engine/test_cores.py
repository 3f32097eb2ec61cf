"""On a CPU, the model computes in the engine core's process, on the cores that the user sets."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rollbus.workers.engines.vllm.launch import engine_arguments
from rollbus.workers.engines.vllm.processes import BINDING, NUM_THREADS, Cores, compute_in_core
from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm


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

    core, others = processes(reloaded)
    assert others == []
    assert core.cpu_affinity() == psutil.Process().cpu_affinity()
    assert len(processes(moe)[1]) == 1
