"""A vLLM engine or its worker is killed midway: nobody waits in vain, and no process stays."""

import asyncio
import json
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import bus
from bus import GenerateRequest, SamplingParams
from schemas.errors import ErrorCode, RequestFailed
from tests.support.fleet import check_generation
from tests.support.results import assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_TIMEOUT_S = 240.0
ENGINE_ARGS = {"dtype": "float32", "max_model_len": 8192}


@dataclass
class Pair:
    """Two vLLM workers; each test kills one."""

    fleet: str
    workers: dict[str, psutil.Popen]

    def survivors(self) -> dict[str, psutil.Popen]:
        """Those that run."""
        return {name: process for name, process in self.workers.items() if process.poll() is None}


@pytest.fixture(scope="module")
def pair(nats_url: str, tiny_moe_float32: Path) -> Iterator[Pair]:
    """Give two workers that serve; what still runs afterwards is killed."""
    fleet = f"killed-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "workers", "--nats", nats_url, "--fleet", fleet, "--model", str(tiny_moe_float32)]
    options = ["--engine-args", json.dumps(ENGINE_ARGS), "--worker-id"]
    pair = Pair(fleet, {name: psutil.Popen([*command, *options, name]) for name in ("a", "b")})

    async def wait() -> None:
        async with bus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers(2, timeout_s=START_TIMEOUT_S)

    try:
        asyncio.run(wait())
        yield pair
    finally:
        for process in pair.survivors().values():
            process.kill()
            process.wait()


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


async def test_a_killed_workers_request_is_finished_by_another(nats_url: str, pair: Pair) -> None:
    """Kill -9 of a worker midway: another goes on, tokens and experts equal an undisturbed run's, no process stays."""
    sampling = SamplingParams(max_tokens=1200, temperature=0, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=range(11, 61), sampling=sampling)
    async with bus.connect(nats_url, fleet=pair.fleet) as rb, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request))
        busy: list[str] = []
        while not busy:
            busy = [worker.worker for worker in (await rb.fleet.state()).workers if worker.in_flight]
        assert not completing.done()
        victim = pair.workers[busy[0]]
        children = victim.children(recursive=True)
        victim.kill()
        disturbed = await completing
        undisturbed = await rb.complete(request)

    assert disturbed.attempts == 2
    assert sorted(disturbed.worker_ids) == ["a", "b"]
    check_generation(disturbed, request)
    assert_same(disturbed, undisturbed)
    _, alive = psutil.wait_procs([victim, *children], timeout=30)
    assert alive == []


async def test_a_killed_engine_core_is_told_to_all(nats_url: str, pair: Pair) -> None:
    """The engine core dies: its requests fail as `engine_dead`, and the worker exits with a non-zero code."""
    (worker,) = pair.survivors().values()
    children = worker.children(recursive=True)
    core = next(child for child in children if "EngineCore" in child.name() + " ".join(child.cmdline()))
    async with bus.connect(nats_url, fleet=pair.fleet, worker_grace_s=0.1) as rb:
        await rb.fleet.wait_for_workers()
        error = await failure_of_stream(rb, core)

    assert error.code is ErrorCode.ENGINE_DEAD
    assert await asyncio.to_thread(worker.wait, 60) == 1
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
