"""A vLLM engine or its worker is killed midway: nobody waits in vain, and no process stays."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

import bus
from bus import GenerateRequest, SamplingParams
from schemas.errors import ErrorCode, RequestFailed
from tests.support.worker_process import worker_process

START_TIMEOUT_S = 110.0
ENGINE_ARGS = {"dtype": "float32", "max_model_len": 8192}


def endless() -> GenerateRequest:
    """A request that takes far longer than the test."""
    return GenerateRequest(prompt_token_ids=[11, 12, 13], sampling=SamplingParams(max_tokens=8000, ignore_eos=True))


async def failure_of_stream(rb: bus.Client, victim: psutil.Process) -> RequestFailed:
    """Kill `victim` once tokens flow, and return how the stream ends."""
    stream = rb.generate(endless())
    await anext(stream)
    victim.send_signal(signal.SIGKILL)
    with pytest.raises(RequestFailed) as caught:
        async for _ in stream:
            pass
    return caught.value


async def test_a_killed_engine_core_is_told_to_all(nats_url: str, fleet: str, tiny_moe_float32: Path) -> None:
    """The engine core dies: its requests fail as `engine_dead`, and the worker exits with a non-zero code."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--model", str(tiny_moe_float32), engine_args=ENGINE_ARGS) as process,
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_TIMEOUT_S)
        children = psutil.Process(process.pid).children(recursive=True)
        core = next(child for child in children if "EngineCore" in child.name() + " ".join(child.cmdline()))
        error = await failure_of_stream(rb, core)

        assert error.code is ErrorCode.ENGINE_DEAD
        async with asyncio.timeout(60):
            assert await process.wait() == 1
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


async def test_a_killed_worker_takes_its_engine_along(nats_url: str, fleet: str, tiny_moe_float32: Path) -> None:
    """Kill -9 of the worker: its requests fail as `worker_lost`, and its engine's processes end by themselves."""
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--model", str(tiny_moe_float32), engine_args=ENGINE_ARGS) as process,
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_TIMEOUT_S)
        worker = psutil.Process(process.pid)
        children = worker.children(recursive=True)
        error = await failure_of_stream(rb, worker)

        assert error.code is ErrorCode.WORKER_LOST
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
