"""While servers and connections fail, the queue loses no request, and all requests are acked in the end."""

import asyncio

import pytest

from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.queue.streams import QueueLimits, ensure_queue, queue_depths
from rollbus.bus.subjects import LANES, Subjects
from tests.bus.queues import MODEL, Publishing, Pulling, publishing, pulling
from tests.support.nats_server import opened, require_binary
from tests.support.tcp_proxy import Direction, tcp_proxy
from tests.support.waits import until

pytestmark = pytest.mark.slow

QUICK = QueueLimits(ack_wait_s=1.0)
"""A short `ack_wait`, so that the queue soon delivers lost requests again."""


async def counts(client: Publishing, fleet: str) -> tuple[int, int]:
    """Return the numbers of waiting and pulled requests in all lanes."""
    depths = await queue_depths(client.nats, Subjects(fleet), (MODEL,))
    return sum(depth.waiting for depth in depths), sum(depth.in_hand for depth in depths)


async def num_lanes(client: Publishing, fleet: str) -> int:
    """Return the number of lanes that workers have created."""
    return len(await queue_depths(client.nats, Subjects(fleet), (MODEL,)))


async def ack_all_requests(worker: Pulling, done: dict[bytes, int]) -> None:
    """Ack and count all requests until cancelled."""
    while True:
        data = await worker.finish(await worker.take())
        done[data] = done.get(data, 0) + 1


@pytest.mark.proves("P5")
async def test_a_killed_server_keeps_waiting_and_pulled_requests(fleet: str) -> None:
    """After a crash of the server, waiting requests arrive in order, and requests without an ack arrive again."""
    require_binary()
    async with EmbeddedServer() as server, publishing(server.url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL, QUICK)
        await client.publish_all(*(str(i).encode() for i in range(20)))
        async with pulling(server.url, fleet, capacity=5, limits=QUICK) as worker, asyncio.TaskGroup() as tasks:
            for request in [await worker.take() for _ in range(5)][:2]:
                await request.ack()
            await until(lambda: counts(client, fleet), (15, 3))
            await server.kill()
            await server.restart()
            worker.capacity, worker.num_held = 100, 0
            done: dict[bytes, int] = {}
            working = tasks.create_task(ack_all_requests(worker, done))
            await until(lambda: counts(client, fleet), (0, 0))
            working.cancel()

    numbers = [int(data) for data in done]
    # The crash may lose the server's record of deliveries and acks.
    assert set(range(2, 20)) <= set(numbers) <= set(range(20))
    assert [number for number in numbers if number >= 5] == list(range(5, 20))


@pytest.mark.proves("P5")
async def test_every_request_is_acked_although_the_server_is_killed_repeatedly(fleet: str) -> None:
    """If the server is killed repeatedly, every request is still acked, and the queue is empty in the end."""
    require_binary()
    num_requests = 3000
    done: dict[bytes, int] = {}
    async with (
        EmbeddedServer() as server,
        publishing(server.url, fleet) as client,
        pulling(server.url, fleet, capacity=8, limits=QUICK) as one,
        pulling(server.url, fleet, capacity=8, limits=QUICK) as other,
        asyncio.TaskGroup() as tasks,
    ):
        await ensure_queue(client.nats, Subjects(fleet), MODEL, QUICK)
        working = [tasks.create_task(ack_all_requests(worker, done)) for worker in (one, other)]
        tokens = []
        for i in range(num_requests):
            tokens.append(await client.send(str(i).encode(), lane=LANES[i % 4]))
            if i % 1000 == 500:
                await client.result(tokens[-250])
                await server.kill()
                await server.restart()
        results = [await client.result(token) for token in tokens]
        await until(lambda: counts(client, fleet), (0, 0))
        for task in working:
            task.cancel()

    assert all(result.ok for result in results)
    assert {len(given) for given in client.results.values()} == {1}
    assert sorted(map(int, done)) == list(range(num_requests))
    # The crash loses acks that the server had received, and ids of requests that they removed.
    assert sum(done.values()) < 1.2 * num_requests


@pytest.mark.parametrize("is_cut", [True, False])
async def test_requests_of_a_disconnected_worker_go_to_another_worker(nats_url: str, fleet: str, is_cut: bool) -> None:
    """Requests on their way to a worker whose connection breaks or freezes are delivered to another worker."""
    async with (
        tcp_proxy(nats_url) as proxy,
        publishing(nats_url, fleet) as client,
        pulling(proxy.url, fleet, capacity=10, limits=QUICK) as parted,
        pulling(nats_url, fleet, capacity=0, limits=QUICK) as other,
    ):
        await until(lambda: num_lanes(client, fleet), 4)
        await client.publish_all(b"a", b"b")
        first = [await parted.take(), await parted.take()]
        if is_cut:
            proxy.cut()
        else:
            proxy.freeze(Direction.BOTH)
        await client.publish_all(b"c", b"d")
        other.capacity = 10
        other.puller.wake()
        taken = sorted(await other.take_all(4))

        assert taken == [b"a", b"b", b"c", b"d"]
        for request in first:
            await request.ack()  # too late, or never sent: no effect on the other worker's requests
        if is_cut:
            await proxy.restore()
        else:
            proxy.thaw()
        other.capacity = -1
        await client.publish_all(b"e")
        while (request := await parted.take()).data != b"e":
            assert request.data in {b"c", b"d"}  # data in the connection when it froze


async def test_a_jetstream_request_is_repeated_on_the_next_connection(nats_url: str, fleet: str) -> None:
    """A JetStream request whose answer is lost with the connection is repeated on the next connection."""
    async with (
        tcp_proxy(nats_url) as proxy,
        publishing(nats_url, fleet) as client,
        opened(proxy.url) as nats,
        asyncio.TaskGroup() as tasks,
    ):
        await ensure_queue(client.nats, Subjects(fleet), MODEL, QUICK)
        proxy.freeze(Direction.TO_CLIENT)
        asking = tasks.create_task(queue_depths(nats, Subjects(fleet), (MODEL,)))
        await asyncio.sleep(0)
        proxy.cut()
        proxy.thaw()
        await proxy.restore()

        assert await asking == await queue_depths(client.nats, Subjects(fleet), (MODEL,))


async def test_workers_create_the_streams_of_a_lost_store_again(fleet: str) -> None:
    """If the server returns without its streams, workers create them again, and requests are delivered."""
    require_binary()
    async with (
        EmbeddedServer() as server,
        publishing(server.url, fleet) as client,
        pulling(server.url, fleet, capacity=100) as worker,
    ):
        await until(lambda: num_lanes(client, fleet), 4)
        port = int(server.url.rpartition(":")[2])
        await server.stop()
        async with EmbeddedServer(port=port):
            while not (result := await client.publish(b"x")).ok:
                assert result.code == "no_workers"
                await asyncio.sleep(0.01)

            assert await worker.take_all(1) == [b"x"]
            assert worker.puller.stats.ensured == 2
