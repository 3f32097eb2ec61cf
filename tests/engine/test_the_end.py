"""Killed processes of engines. Each shared engine is killed only once, after the last test that uses it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbus.schemas.errors import EngineDead
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt
from tests.support.vllm_engine import RunningEngine
from tests.support.waits import SOON_S

pytestmark = pytest.mark.vllm


LONG = GenerateRequest(prompt_token_ids=prompt(50, seed=80), sampling=SamplingParams(max_tokens=400, ignore_eos=True))


def engine_core(running: RunningEngine) -> psutil.Process:
    """Return the process of the engine core."""
    llm = running.engine._launch.llm
    return psutil.Process(llm.engine_core.resources.engine_manager.processes[0].pid)


async def read_on(running: RunningEngine) -> None:
    """Read steps until an error."""
    while True:
        await running.next()


async def raises_engine_dead(call: Coroutine[Any, Any, None]) -> bool:
    """Wait until a call into the engine fails, because no call may outlive the engine, and return True."""
    with pytest.raises(EngineDead):
        await call
    return True


async def until_dead(running: RunningEngine) -> None:
    """Read until the engine is dead. Then assert that it rejects requests and ignores aborts."""
    try:
        with pytest.raises(EngineDead):
            await read_on(running)
        with pytest.raises(EngineDead):
            await running.add(LONG)
        await running.engine.abort(["any"])
    finally:
        await running.engine.close()


def test_a_killed_engine_core_raises_engine_dead(reloaded: RunningEngine) -> None:
    """If the engine core is killed, all calls and reads raise `EngineDead`, and its child processes exit."""
    core = engine_core(reloaded)
    workers = core.children(recursive=True)

    async def scenario() -> None:
        await reloaded.add(LONG)
        await reloaded.next()
        async with asyncio.TaskGroup() as group:
            core.suspend()
            calls = [
                group.create_task(raises_engine_dead(call))
                for call in (reloaded.engine.pause(), reloaded.engine.resume())
            ]
            # The calls are sent here and can get no answer.
            await asyncio.sleep(0)
            core.kill()
            await until_dead(reloaded)
        assert all(call.result() for call in calls)

    reloaded.call(scenario())

    assert workers
    assert psutil.wait_procs(workers, timeout=SOON_S)[1] == []


def test_a_killed_model_process_raises_engine_dead(reloaded: RunningEngine) -> None:
    """If the process with the model is killed, the engine core exits and the engine raises `EngineDead`."""
    core = engine_core(reloaded)

    async def scenario() -> None:
        await reloaded.add(LONG)
        await reloaded.next()
        [worker] = [child for child in core.children() if "resource_tracker" not in " ".join(child.cmdline())]
        worker.kill()
        await until_dead(reloaded)

    reloaded.call(scenario())

    assert psutil.wait_procs([core], timeout=SOON_S)[1] == []


def test_engine_processes_exit_with_their_owner_and_write_nothing_to_its_stdout(models: dict[str, Path]) -> None:
    """The engine's processes exit when their owner is killed, but not on its Ctrl-C.

    They write nothing to the owner's stdout.
    """
    command = [sys.executable, "-m", "tests.engine.owner", str(models["dense"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            line = owner.stdout.readline()
            children = [psutil.Process(pid) for pid in json.loads(line)]
            groups = {child.name(): os.getpgid(child.pid) for child in children}
        finally:
            os.kill(owner.pid, signal.SIGKILL)
        rest = owner.stdout.read()

    assert len(children) >= 2
    assert any(group != os.getpgid(0) for group in groups.values())
    assert rest == ""
    assert psutil.wait_procs(children, timeout=SOON_S)[1] == []


# vLLM's log lines are JSON if the worker's lines are JSON, also in the processes that vLLM starts.


# The steps of an engine core's process before its first log line: vLLM's own setup and its prefix of each line.
CORE = """
from vllm import logger
from vllm.logger import init_logger
from vllm.utils.system_utils import decorate_logs
if hasattr(logger, "configure_logging"):
    # From 0.32 on; before, importing it was enough.
    from vllm.config.logging import LoggingConfig
    logger.configure_logging(LoggingConfig())
decorate_logs("EngineCore")
init_logger("vllm.some.module").warning("it is %s", "so")
init_logger("vllm.some.module").info("not shown")
import logging
logging.getLogger("rollbus.workers.engines.vllm.extension").error("lora.load_failed name=%s", "math")
"""
WORKER = f"""
import subprocess, sys
from rollbus.bus.logs import set_up
from rollbus.workers.engines.vllm.launch import set_environment
set_up("INFO", "json")
set_environment("model", None)
subprocess.run([sys.executable, "-c", {CORE!r}], check=True)
"""


def test_an_engine_core_logs_json() -> None:
    """A log line of vLLM is JSON, with vLLM's level, and so are rollbus's own log lines in that process."""
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)

    lines = [json.loads(line) for line in done.stderr.splitlines()]
    shown = [
        (line["level"], line["logger"], line["event"], line["fields"])
        for line in lines
        # vLLM warns about missing features of the machine.
        if not line["logger"].startswith("vllm.platforms")
    ]
    assert shown == [
        ("warning", "vllm.some.module", "message", {"message": "it is so"}),
        ("error", "rollbus.workers.engines.vllm.extension", "lora.load_failed", {"name": "math"}),
    ]


# The processes of an engine also import rollbus's modules as parts of `rollbus`.


def test_an_engine_imports_nothing_under_a_second_name(reloaded: RunningEngine) -> None:
    """Each rollbus module in the process with the model has a name that begins with `rollbus.`."""
    found = reloaded.call(reloaded.engine._launch.llm.collective_rpc("modules_of_ours"))

    [(rightly, wrongly)] = found
    assert wrongly == []
    assert {"rollbus.workers.engines.vllm.extension", "rollbus.workers.engines.vllm.processes"} <= set(rightly)
