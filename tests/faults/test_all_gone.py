"""If workers and the NATS server are gone, requests fail after the grace time and not at their deadlines."""

import asyncio
import contextlib

import pytest

import rollbus
from rollbus.bus.client import runtime
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.errors import ErrorCode, NoWorkers, RequestError
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import served, synthetic_worker
from tests.support.hand_worker import chunk, request, worker_by_hand
from tests.support.nats_server import require_binary
from tests.support.requests import greedy
from tests.support.worker_process import worker_process

pytestmark = pytest.mark.slow

SLOW = {"step_s": 0.05, "max_num_seqs": 1}


async def failing(rb: rollbus.Client, *, after: asyncio.Event | None = None) -> RequestError:
    """Return the error of a request that would run for minutes, and set `after` when it has a token."""
    with pytest.raises(RequestError) as caught:  # noqa: PT012
        async for _ in rb.generate(greedy(1, 10_000)):
            if after is not None:
                after.set()
    return caught.value


@pytest.mark.proves("P1", "P69")
async def test_requests_fail_if_workers_and_server_are_killed_together(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests fail with `worker_lost`, and waiting and new requests with `no_workers`."""
    require_binary()
    monkeypatch.setattr(runtime, "UNHEARD_S", 0.5)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        process = await stack.enter_async_context(worker_process(server.url, fleet, engine_args=SLOW))
        rb = await stack.enter_async_context(rollbus.connect(server.url, fleet=fleet, worker_grace_s=0.5))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await rb.fleet.wait_for_workers(timeout_s=60)
        runs = asyncio.Event()
        running = tasks.create_task(failing(rb, after=runs))
        await runs.wait()
        waiting = tasks.create_task(failing(rb))
        await asyncio.sleep(0)
        process.kill()
        await server.kill()
        errors = [await running, await waiting]

        assert [error.code for error in errors] == [ErrorCode.WORKER_LOST, ErrorCode.NO_WORKERS]
        assert all(error.retryable for error in errors)
        assert "NATS has not answered" in errors[0].message
        with pytest.raises(NoWorkers, match="the connection to NATS is down"):
            await rb.complete(greedy(1, 1))
        await server.restart()


async def test_the_grace_time_starts_when_the_workers_stop(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the workers stopped in order, the grace time starts then, whether or not the server is present."""
    require_binary()
    monkeypatch.setattr(runtime, "UNHEARD_S", 3600.0)
    async with (
        EmbeddedServer() as server,
        rollbus.connect(server.url, fleet=fleet, worker_grace_s=1.5) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        async with synthetic_worker(server.url, fleet, config=SyntheticConfig(step_s=0.05)):
            await rb.fleet.wait_for_workers()
            runs = asyncio.Event()
            running = tasks.create_task(failing(rb, after=runs))
            await runs.wait()
        await server.kill()
        error = await running
        await server.restart()

    assert error.code is ErrorCode.WORKER_STOPPED
    assert error.retryable


async def test_requests_wait_for_the_only_worker_to_start(nats_url: str, fleet: str) -> None:
    """Requests wait for a starting worker beyond the grace time, up to the start time that the worker announces."""
    async with (
        worker_by_hand(nats_url, fleet) as worker,
        rollbus.connect(nats_url, fleet=fleet, client="me", worker_grace_s=0.2) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        completing = tasks.create_task(rb.complete(request(1)))
        first = await worker.next_key()
        await worker.frame(0, admitted=(first,))
        await worker.acked(1)
        worker.start_left_s = 100.0
        await worker.announce(WorkerState.FAILED)
        worker.incarnation = "life-2"
        await worker.announce(WorkerState.STARTING)
        # Several rounds in which the request could fail.
        _, pending = await asyncio.wait([completing], timeout=2)
        assert pending
        worker.start_left_s = None
        await worker.announce()
        second = await worker.next_key()
        await worker.frame(0, chunk(second, 0, 1, total=1), admitted=(second,))
        await completing

        late = tasks.create_task(failing(rb))
        key = await worker.next_key()
        await worker.frame(1, admitted=(key,))
        await worker.acked(2)
        await worker.announce(WorkerState.FAILED)
        worker.start_left_s = 0.0
        await worker.announce(WorkerState.STARTING)
        assert (await late).code is ErrorCode.WORKER_LOST


async def test_no_request_fails_if_the_server_returns_within_the_grace_time(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is away for longer than a lease but less than lease and grace time, no request fails."""
    require_binary()
    monkeypatch.setattr(runtime, "UNHEARD_S", 0.5)
    async with (
        EmbeddedServer() as server,
        served(server.url, fleet, config=SyntheticConfig(step_s=0.01), lease_s=2.0, options={"worker_grace_s": 60}) as (
            rb,
            *_,
        ),
    ):
        stream = rb.generate(greedy(1, 300))
        chunks = [await anext(stream)]
        await server.kill()
        # The test is about an outage of this length.
        await asyncio.sleep(3)
        await server.restart()
        chunks += [chunk async for chunk in stream]

    assert sum(chunk.num_tokens for chunk in chunks) == 300
