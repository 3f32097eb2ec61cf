"""A worker's edges: what it does while its engine takes on, starts and closes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

import bus
from bus import GenerateRequest, SamplingParams
from bus.embedded import EmbeddedServer
from bus.protocol.step import RequestStep
from schemas.errors import ErrorCode, RequestFailed
from tests.support.connections import count_tasks
from tests.support.fleet import check_generation, synthetic_worker, until_idle
from workers.config import WorkerConfig
from workers.engines.synthetic import SyntheticConfig, SyntheticEngine
from workers.worker import Worker


class GatedEngine(SyntheticEngine):
    """Starts, steps, takes on and closes only while the gate of that name is open; tells when it waits there."""

    def __init__(self, *closed: str, config: SyntheticConfig | None = None) -> None:
        super().__init__(config)
        self.gates = {name: asyncio.Event() for name in ("start", "steps", "add", "close")}
        self.reached = {name: asyncio.Event() for name in self.gates}
        for name in self.gates.keys() - set(closed):
            self.gates[name].set()

    async def _pass(self, name: str) -> None:
        self.reached[name].set()
        await self.gates[name].wait()

    async def start(self) -> None:
        """Wait, then start."""
        await self._pass("start")
        await super().start()

    async def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Wait, then go on as ever."""
        await self._pass("steps")
        async for steps in super().steps():
            yield steps

    async def add(self, key: str, request: GenerateRequest) -> None:
        """Wait, then take on."""
        await self._pass("add")
        await super().add(key, request)

    async def close(self) -> None:
        """Wait, then close."""
        await self._pass("close")
        await super().close()


@contextlib.asynccontextmanager
async def running(
    nats_url: str, fleet: str, engine: SyntheticEngine
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """Run a worker on `engine`; it is cancelled when the block ends and it has not."""
    worker = Worker(WorkerConfig(nats_url=nats_url, fleet=fleet, model="synthetic"), engine)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(worker.run(), name="worker")
        try:
            yield worker, task
        finally:
            task.cancel()


def greedy(max_tokens: int, **fields: object) -> GenerateRequest:
    """A greedy request of exactly `max_tokens`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling, **fields)  # type: ignore[arg-type]


async def test_requests_that_wait_are_told_of_the_stop(nats_url: str, fleet: str) -> None:
    """Requests that wait behind another for the engine fail as `worker_stopped` at once, not at their deadline."""
    engine = GatedEngine("add")
    async with (
        bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
        running(nats_url, fleet, engine) as (worker, _),
    ):
        await rb.fleet.wait_for_workers()
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):
            waiting = [tasks.create_task(failure(rb, greedy(1))) for _ in range(10)]
            await engine.reached["add"].wait()
            worker.stop()

    assert {task.result() for task in waiting} == {ErrorCode.WORKER_STOPPED}


async def failure(rb: bus.Client, request: GenerateRequest) -> ErrorCode:
    """Complete what must fail and return why it did."""
    with pytest.raises(RequestFailed) as caught:
        await rb.complete(request)
    return caught.value.code


async def test_a_worker_that_closes_its_engine_takes_no_requests(nats_url: str, fleet: str) -> None:
    """While a stopped worker still closes its engine, every request goes to the worker that is left."""
    engine = GatedEngine("close")
    async with (
        bus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
        synthetic_worker(nats_url, fleet),
        running(nats_url, fleet, engine) as (worker, _),
    ):
        await rb.fleet.wait_for_workers(2)
        worker.stop()
        await engine.reached["close"].wait()
        async with asyncio.timeout(20):
            results = [generation async for generation in rb.complete_many(greedy(2) for _ in range(50))]

    assert [generation.error for generation in results] == [None] * 50


async def test_a_request_given_up_while_the_engine_takes_it_on_is_aborted(fleet: str) -> None:
    """A worker that loses its connection during `Engine.add` aborts that request too: nobody would read it."""
    engine = GatedEngine("add", config=SyntheticConfig(step_s=0.001, max_model_len=10_000_000))
    async with (
        EmbeddedServer() as server,
        running(server.url, fleet, engine) as (worker, _),
        bus.connect(server.url, fleet=fleet, worker_grace_s=0.1) as rb,
    ):
        await rb.fleet.wait_for_workers()
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
            completing = tasks.create_task(rb.complete(greedy(1_000_000)))
            await engine.reached["add"].wait()
            life = worker.presence().incarnation
            await server.kill()
            await server.restart()
            while worker.presence().incarnation == life or (await rb.fleet.state()).workers == ():
                pass
            engine.gates["add"].set()
            # Requests are taken on in order, so that the first answer comes after the one given up was.
            await rb.complete(greedy(1))
            # Its next attempt, which the client asked for when it was back.
            completing.cancel()
            await until_idle(engine, rb)


async def test_an_engine_that_is_ready_while_the_server_is_away(fleet: str) -> None:
    """A worker whose engine comes up during an outage serves as soon as the server is back."""
    engine = GatedEngine("start")
    async with EmbeddedServer() as server, running(server.url, fleet, engine), asyncio.timeout(30):
        await engine.reached["start"].wait()
        async with bus.connect(server.url, fleet=fleet, worker_grace_s=0.1) as rb:
            # In this order what the worker sends then is lost on its way.
            engine.gates["start"].set()
            await server.kill()
            await engine.reached["steps"].wait()
            await server.restart()
            await rb.fleet.wait_for_workers(timeout_s=8)
            check_generation(await rb.complete(greedy(2)), greedy(2))


async def test_a_cancelled_close_leaves_no_connection(nats_url: str, fleet: str) -> None:
    """A worker that is cancelled while it closes its engine still closes its connection."""
    engine = GatedEngine("close")
    before = await count_tasks()
    async with running(nats_url, fleet, engine) as (worker, task):
        worker.stop()
        await engine.reached["close"].wait()
        task.cancel()

    assert await count_tasks() == before


async def test_a_full_worker_says_so(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the engine runs and what may wait, requests are refused as `queue_full`; the others finish."""
    monkeypatch.setattr("workers.worker.MAX_WAITING", 3)
    config = SyntheticConfig(max_num_seqs=1, step_s=0.001)
    async with (
        bus.connect(nats_url, fleet=fleet) as rb,
        synthetic_worker(nats_url, fleet, config=config) as (worker, _),
    ):
        await rb.fleet.wait_for_workers()
        errors = []
        async for generation in rb.complete_many(greedy(200) for _ in range(30)):
            assert worker.presence().in_flight <= 4
            errors.append(generation.error)

    assert {error.code for error in errors if error is not None} == {ErrorCode.QUEUE_FULL}
    assert 1 <= errors.count(None) <= 4
