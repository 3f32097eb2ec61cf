"""If a vLLM engine or its worker is killed during a request, no caller hangs, and no process remains."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from nats.aio.msg import Msg

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.nats.connection import publish
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode, RequestFailed
from rollbus.schemas.messages import decode_presence
from tests.support.fleet import check_generation
from tests.support.nats_server import opened
from tests.support.processes import becomes_true
from tests.support.real_fleet import RealWorkers
from tests.support.requests import assert_same
from tests.support.waits import SOON_S, until

pytestmark = pytest.mark.vllm


def endless() -> GenerateRequest:
    """Return a request that takes far longer than the test."""
    return GenerateRequest(prompt_token_ids=[11, 12, 13], sampling=SamplingParams(max_tokens=8000, ignore_eos=True))


async def failure_of_stream(rb: rollbus.Client, victim: psutil.Process) -> RequestFailed:
    """Kill `victim` after the first tokens, and return the error of the stream."""
    stream = rb.generate(endless())
    await anext(stream)
    victim.send_signal(signal.SIGKILL)
    with pytest.raises(RequestFailed) as caught:
        async for _ in stream:
            pass
    return caught.value


async def busy_worker(nats_url: str, fleet: str) -> str:
    """Ping all workers until one has a request in flight, and return its id."""
    busy: list[str] = []

    async def note(message: Msg) -> None:
        presence = decode_presence(message.data)
        if presence.in_flight:
            busy.append(presence.worker)

    async with opened(nats_url) as nats:

        async def is_found() -> bool:
            await publish(nats, Subjects(fleet).ping, b"")
            return bool(busy)

        await nats.subscribe(Subjects(fleet).presences, cb=note)
        await until(is_found, True)
    return busy[0]


@pytest.fixture
def unforked_workers(nats_url: str, tiny_moes: tuple[Path, Path]) -> Iterator[RealWorkers]:
    """Run workers with processes of their own, as users start them."""
    workers = RealWorkers(nats_url, tiny_moes[1], version=1, forked=False)
    try:
        yield workers
    finally:
        workers.stop()


@pytest.mark.proves("P2")
async def test_another_worker_finishes_the_request_of_a_killed_worker(nats_url: str, real_workers: RealWorkers) -> None:
    """After kill -9 of a worker, another worker completes its request with undisturbed tokens and experts.

    No process of the killed worker remains.
    """
    sampling = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=range(11, 61), sampling=sampling)
    pair = await real_workers.have(2)
    async with rollbus.connect(nats_url, fleet=real_workers.fleet) as rb, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request))
        # A state of the fleet takes as long as a fast machine takes for the request.
        victim = pair[await busy_worker(nats_url, real_workers.fleet)]
        family = victim.children(recursive=True)
        victim.kill()
        disturbed = await completing
        undisturbed = await rb.complete(request)

    assert disturbed.attempts == 2
    assert sorted(disturbed.worker_ids) == sorted(pair)
    check_generation(disturbed, request)
    assert_same(disturbed, undisturbed)
    assert victim.wait(SOON_S) is not None
    gone, alive = await asyncio.to_thread(psutil.wait_procs, family, SOON_S)
    assert len(gone) >= 2  # Its fork server and its engine core.
    assert alive == []


@pytest.mark.proves("P71")
async def test_requests_of_a_killed_engine_core_fail_with_engine_dead(
    nats_url: str, unforked_workers: RealWorkers
) -> None:
    """If the engine core dies, its requests fail with `engine_dead`, and the worker exits with a non-zero code.

    The core's parent is a fork of the worker, without the worker's connection.
    """
    (worker,) = (await unforked_workers.have(1)).values()
    children = worker.children(recursive=True)
    core = next(child for child in children if "EngineCore" in child.name() + " ".join(child.cmdline()))
    server = core.parent()
    assert server.parent() == worker
    assert [len(process.net_connections("inet")) for process in (worker, server)] == [1, 0]
    async with rollbus.connect(nats_url, fleet=unforked_workers.fleet, worker_grace_s=0.1) as rb:
        await rb.fleet.wait_for_workers()
        error = await failure_of_stream(rb, core)

    assert error.code is ErrorCode.ENGINE_DEAD
    assert await asyncio.to_thread(worker.wait, SOON_S) == 1
    _, alive = psutil.wait_procs(children, timeout=SOON_S)
    assert alive == []


async def test_a_signal_during_the_import_of_vllm_ends_the_worker(unforked_workers: RealWorkers) -> None:
    """A worker that still imports vLLM exits with 0 at a signal."""
    name = unforked_workers.add()
    worker = unforked_workers.living[name]
    mapped = worker.memory_maps
    assert await asyncio.to_thread(becomes_true, lambda: any("libtorch_cpu" in each.path for each in mapped()))
    worker.terminate()

    assert await asyncio.to_thread(worker.wait, SOON_S) == 0
