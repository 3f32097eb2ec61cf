"""The lifecycle of a worker: start, stop, lost lease, and an engine that hangs."""

import asyncio
import os
import signal

import pytest

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.errors import EngineDead, ErrorCode, RequestRejected
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import check_generation, is_idle, served, synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_worker import GatedEngine, running
from tests.support.nats_server import count_tasks
from tests.support.requests import endless, greedy, short
from tests.support.waits import SOON_S, until_true
from tests.workers.support import SLOW, StartHeard, heard_worker

pytestmark = pytest.mark.slow


@pytest.mark.proves("P28")
async def test_a_worker_publishes_its_presence_before_its_engine_loads(nats_url: str, fleet: str) -> None:
    """A worker publishes that it starts, and its remaining start time, before its engine begins to load."""
    engine = GatedEngine("start")
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        running(nats_url, fleet, engine, start_timeout_s=100.0),
        asyncio.timeout(SOON_S),
    ):
        while not (workers := (await rb.fleet.state()).workers):
            pass
        (starting,) = workers
        assert starting.state is WorkerState.STARTING
        assert 0 < starting.start_left_s <= 100
        engine.gates["start"].set()
        await rb.fleet.wait_for_workers()
        (serving,) = (await rb.fleet.state()).workers
        assert serving.start_left_s is None


async def test_waiting_requests_of_a_stopped_worker_return_to_the_queue(nats_url: str, fleet: str) -> None:
    """Requests that wait for the engine of a stopped worker go back to the queue immediately.

    Its offered requests continue.
    """
    engine = GatedEngine("add")
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        running(nats_url, fleet, engine) as (worker, _),
        asyncio.TaskGroup() as tasks,
        asyncio.timeout(SOON_S),
    ):
        await rb.fleet.wait_for_workers()
        waiting = [tasks.create_task(rb.complete(greedy(1, 1))) for _ in range(10)]
        await engine.reached["add"].wait()
        async with synthetic_worker(nats_url, fleet, worker_id="other"):
            await rb.fleet.wait_for_workers(2)
            worker.stop()
            results = [await task for task in waiting]

    assert {generation.worker_ids[-1] for generation in results} == {"other"}


async def test_a_worker_that_closes_its_engine_accepts_no_requests(nats_url: str, fleet: str) -> None:
    """While a stopped worker closes its engine, every request goes to the remaining worker."""
    engine = GatedEngine("close")
    async with (
        rollbus.connect(nats_url, fleet=fleet, worker_grace_s=0.1) as rb,
        synthetic_worker(nats_url, fleet),
        running(nats_url, fleet, engine) as (worker, _),
    ):
        await rb.fleet.wait_for_workers(2)
        worker.stop()
        await engine.reached["close"].wait()
        async with asyncio.timeout(SOON_S):
            results = [generation async for generation in rb.complete_many(greedy(1, 2) for _ in range(50))]

    assert [generation.error for generation in results] == [None] * 50


async def test_a_worker_whose_engine_starts_during_an_outage_serves_afterwards(fleet: str) -> None:
    """A worker whose engine finishes its start during an outage serves as soon as the server is back."""
    engine = GatedEngine("start")
    async with (
        EmbeddedServer() as server,
        running(server.url, fleet, engine) as (worker, _),
        rollbus.connect(server.url, fleet=fleet, worker_grace_s=0.1) as rb,
        asyncio.timeout(SOON_S),
    ):
        await engine.reached["start"].wait()
        await until_true(lambda: worker.stats().puller.ensured)
        await server.kill()
        engine.gates["start"].set()
        await server.restart()
        await rb.fleet.wait_for_workers(timeout_s=SOON_S)
        check_generation(await rb.complete(greedy(1, 2)), greedy(1, 2))


async def test_a_cancelled_close_leaves_no_connection(nats_url: str, fleet: str) -> None:
    """A worker that is cancelled while it closes its engine still closes its connection."""
    engine = GatedEngine("close")
    before = await count_tasks()
    async with running(nats_url, fleet, engine) as (worker, task):
        worker.stop()
        await engine.reached["close"].wait()
        task.cancel()

    assert await count_tasks() == before


@pytest.mark.proves("P71")
async def test_an_engine_that_hangs_counts_as_dead(nats_url: str, fleet: str) -> None:
    """An engine with requests that makes no step in time ends its worker, and every open request gets an error."""
    engine = GatedEngine("steps")
    async with hand_client(nats_url, fleet) as client, asyncio.timeout(SOON_S):
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with running(nats_url, fleet, engine, engine_timeout_s=1.0) as (_, task):
                await client.until_serving("w")
                await client.enqueue(short("r"))
                await task
        await client.until(lambda: client.presences["w"].state is WorkerState.FAILED)

        await client.until_ended("r")
        assert caught.group_contains(EngineDead, match="completed no step for 1 s")
        assert client.error_of("r") == ErrorCode.ENGINE_DEAD


async def test_an_engine_error_longer_than_a_message_is_truncated(fleet: str) -> None:
    """An engine whose last error is longer than a message still ends its requests and its worker normally."""
    engine = GatedEngine()
    async with EmbeddedServer(max_payload_bytes=65_536) as server, hand_client(server.url, fleet) as client:
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with running(server.url, fleet, engine) as (_, task):
                await client.until_serving("w")
                await client.enqueue(endless("r"))
                await client.until(lambda: client.offers)
                engine.kill("x" * 100_000)
                await task
        await client.until(lambda: client.presences["w"].state is WorkerState.FAILED)

        await client.until_ended("r")
        assert caught.group_contains(EngineDead)
        assert client.error_of("r") == ErrorCode.ENGINE_DEAD


async def test_an_idle_engine_is_not_dead(heard_worker: StartHeard) -> None:
    """An engine without requests makes no steps and does not count as dead."""
    async with heard_worker(engine_timeout_s=0.5) as (client, *_):
        await client.until(lambda: client.presences["w"].uptime_s > 2.5)
        await client.complete(short("r"))

        assert client.error_of("r") is None


async def test_a_stopped_worker_waits_for_its_clients(nats_url: str, fleet: str) -> None:
    """A stopping worker keeps its last frames and sends them again on demand, until the client has them."""
    engine = GatedEngine(config=SLOW)
    async with (
        hand_client(nats_url, fleet, answers=False) as client,
        running(nats_url, fleet, engine) as (worker, task),
    ):
        await client.until_serving("w")
        await client.begin(endless("r"))
        worker.stop()
        await client.until_ended("r")
        assert client.error_of("r") == ErrorCode.WORKER_STOPPED
        await client.until_state("w", WorkerState.DRAINED)
        count, message = len(client.frames), client.receivers["w"].message(window=1 << 20, now=0.0)
        await client.say("w", type(message)(1, [], client.incarnation, message.incarnation, 0, 0, 1 << 20, True))
        await client.until(lambda: len(client.frames) >= 2 * count)
        await client.answer("w")
        async with asyncio.timeout(SOON_S):
            await task
        await client.until(lambda: client.presences["w"].state is WorkerState.STOPPED)


async def test_a_stopped_worker_waits_at_most_two_seconds_for_a_client(nats_url: str, fleet: str) -> None:
    """A client that acknowledges nothing delays a stopping worker for at most two seconds."""
    async with hand_client(nats_url, fleet, answers=False) as client, asyncio.timeout(SOON_S):
        async with synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW) as (worker, _):
            await client.until_serving("w")
            await client.begin(endless("r"))
        await client.until(lambda: client.presences["w"].state is WorkerState.STOPPED)

        # The next worker may serve the requests that no client confirmed.
        assert worker.debug_state()["unacked_messages"] == 1


@pytest.mark.proves("P63")
async def test_a_worker_that_lost_its_lease_serves_as_a_new_incarnation(fleet: str) -> None:
    """A worker whose lease the server does not confirm drops its requests, and serves again as a new incarnation."""
    async with (
        EmbeddedServer() as server,
        heard_worker(server.url, fleet, lease_s=2.0) as (client, worker, engine),
        asyncio.timeout(SOON_S),
    ):
        await client.begin(endless("r"))
        life = worker.presence().incarnation
        os.kill(server.pid, signal.SIGSTOP)
        await until_true(lambda: worker.presence().state is WorkerState.FENCED and is_idle(engine))
        assert worker.presence().in_flight == 0
        os.kill(server.pid, signal.SIGCONT)
        await client.until(lambda: client.presences["w"].incarnation != life)
        await client.until_serving("w")
        await client.complete(short("s"))

        assert not client.ended("r")
        assert worker.stats().links.given_up == 1
        assert client.receivers["w"].incarnation == worker.presence().incarnation


async def test_routing_that_fits_no_message_is_refused(fleet: str) -> None:
    """If one row is larger than a message, a request for routing is rejected. A request without it is served."""
    config = SyntheticConfig(num_layers=1024, top_k=64, num_experts=64)
    async with (
        EmbeddedServer(max_payload_bytes=65_536) as server,
        served(server.url, fleet, config=config) as (rb, *_),
        asyncio.timeout(SOON_S),
    ):
        with pytest.raises(RequestRejected, match="a row of this model's routed experts has 65536 bytes") as caught:
            await rb.complete(greedy(1, 3))
        generation = await rb.complete(greedy(1, 3, return_routed_experts=False))

    assert caught.value.code is ErrorCode.TOO_LARGE
    assert len(generation.token_ids) == 3
