"""A vLLM engine or its worker is killed midway: nobody waits in vain, and no process stays."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

import bus
from bus import GenerateRequest, SamplingParams
from schemas.errors import ErrorCode, RequestFailed
from tests.support.fleet import check_generation
from tests.support.results import assert_same
from tests.support.worker_process import worker_process

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_TIMEOUT_S = 240.0
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
        bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
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


async def test_a_killed_workers_request_is_finished_by_another(
    nats_url: str, fleet: str, tiny_moe_float32: Path
) -> None:
    """Kill -9 of a worker midway: another goes on, tokens and experts equal an undisturbed run's, no process stays."""
    options = ("--model", str(tiny_moe_float32), "--worker-id")
    sampling = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=range(11, 61), sampling=sampling)
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *options, "a", engine_args=ENGINE_ARGS) as a,
        worker_process(nats_url, fleet, *options, "b", engine_args=ENGINE_ARGS) as b,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(2, timeout_s=START_TIMEOUT_S)
        completing = tasks.create_task(rb.complete(request))
        busy: list[str] = []
        while not busy:
            busy = [worker.worker for worker in (await rb.fleet.state()).workers if worker.in_flight]
        assert not completing.done()
        victim = psutil.Process({"a": a, "b": b}[busy[0]].pid)
        children = victim.children(recursive=True)
        victim.kill()
        disturbed = await completing
        undisturbed = await rb.complete(request)

    assert disturbed.attempts == 2
    assert sorted(disturbed.worker_ids) == ["a", "b"]
    check_generation(disturbed, request)
    assert_same(disturbed, undisturbed)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
