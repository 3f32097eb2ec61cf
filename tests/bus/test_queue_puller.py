"""Pulling from the queue: lanes in order, as much as there is room for, and nothing lost that was handed out."""

import asyncio

import pytest

from rollbus.bus.nats.jetstream import ApiError, ask
from rollbus.bus.protocol.queue.pull_plan import MAX_OVER
from rollbus.bus.queue.limits import QueueLimits
from rollbus.bus.queue.puller import QueuePuller
from rollbus.bus.queue.streams import ensure_queue, queue_depths, stream_name
from rollbus.bus.subjects import LANES, Subjects
from rollbus.schemas.errors import BusBroken, BusClosed
from tests.support.connections import count_tasks, opened
from tests.support.queues import MODEL, Publishing, publishing, pulling
from tests.support.waits import until, until_true

QUICK = QueueLimits(ack_wait_s=0.5)
"""For tests of what happens when a worker says nothing more."""


def numbered(count: int) -> list[bytes]:
    """The contents of as many requests."""
    return [str(i).encode() for i in range(count)]


async def is_empty(client: Publishing, fleet: str) -> bool:
    """Nothing waits and nothing is in hand."""
    depths = await queue_depths(client.nats, Subjects(fleet), (MODEL,))
    return not any(depth.waiting or depth.in_hand for depth in depths)


async def exists_queue(client: Publishing, fleet: str) -> bool:
    """A worker has made the queue."""
    return bool(await queue_depths(client.nats, Subjects(fleet), (MODEL,)))


async def num_pulls(client: Publishing, fleet: str) -> int:
    """How many pulls wait on the lane `normal`; none as long as no worker has made it."""
    name = stream_name(Subjects(fleet), MODEL, "normal")
    try:
        return int((await ask(client.nats, f"CONSUMER.INFO.{name}.normal")).get("num_waiting", 0))
    except ApiError:
        return 0


@pytest.mark.proves("P40")
async def test_a_lane_is_first_in_first_out(nats_url: str, fleet: str) -> None:
    """What waits in a lane is handed over in the order in which it was published, each request once."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*numbered(1000))
        async with pulling(nats_url, fleet, capacity=7) as worker:
            assert await worker.take_all(1000) == numbered(1000)
            await until(lambda: is_empty(client, fleet), True)

            assert worker.puller.stats.handed_over == 1000


@pytest.mark.proves("P40")
async def test_lanes_are_emptied_in_their_order(nats_url: str, fleet: str) -> None:
    """Of what waits, resumed requests go first, then high, normal and low, whatever was published first."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        for lane in reversed(LANES):
            await client.publish_all(*[lane.encode()] * 10, lane=lane)
        async with pulling(nats_url, fleet, capacity=3) as worker:
            taken = await worker.take_all(40)

    assert taken == [lane.encode() for lane in LANES for _ in range(10)]


async def test_an_idle_worker_is_handed_each_request_as_it_comes(nats_url: str, fleet: str) -> None:
    """A worker that waits is handed requests of any lane, one pull for each, with what it must know of them."""
    async with pulling(nats_url, fleet, capacity=5) as worker, publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        for lane in LANES:
            assert (await client.publish(lane.encode(), lane=lane)).ok
            request = await worker.take()

            assert (request.client, request.lane, request.data) == ("alice", lane, lane.encode())
            assert (request.num_delivered, request.num_pending) == (1, 0)
            assert request.subject == Subjects(fleet).request("alice", MODEL, lane)
            assert repr(request) == f"<QueuedRequest {request.subject} bytes={len(lane)} num_delivered=1>"
            await worker.finish(request)


async def test_a_worker_is_handed_little_more_than_it_has_room_for(nats_url: str, fleet: str) -> None:
    """However much waits, and wherever, what a worker holds exceeds its room by at most three."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=2) as worker:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        for lane in LANES:
            await client.publish_all(*numbered(20), lane=lane)
        for num_finished in range(80):
            request = await worker.take()

            assert worker.num_held <= worker.capacity + MAX_OVER
            if num_finished == 40:
                worker.capacity = 1
            await worker.finish(request)

        assert worker.puller.stats.given_back == 0


async def test_two_workers_share_a_queue(nats_url: str, fleet: str) -> None:
    """Each request goes to one worker; one that is full leaves the rest to the other."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*numbered(10))
        async with pulling(nats_url, fleet, capacity=4) as one:
            held = [(await one.take()).data for _ in range(4)]
            async with pulling(nats_url, fleet, capacity=10) as other:
                rest = [(await other.take()).data for _ in range(6)]

    assert sorted(held + rest) == sorted(numbered(10))


@pytest.mark.slow
async def test_what_a_silent_worker_holds_goes_to_another(nats_url: str, fleet: str) -> None:
    """A request that nobody speaks for is handed out again; one whose worker says in_progress is not."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=2, limits=QUICK) as silent:
        await until(lambda: exists_queue(client, fleet), True)
        await client.publish_all(b"kept", b"lost")
        kept, lost = await silent.take(), await silent.take()
        async with asyncio.TaskGroup() as tasks, pulling(nats_url, fleet, capacity=2, limits=QUICK) as other:

            async def keep() -> None:
                while True:
                    await kept.in_progress()
                    await asyncio.sleep(QUICK.ack_wait_s / 4)

            keeping = tasks.create_task(keep())
            again = await other.take()
            # Longer than the request would have waited for a silent worker.
            await asyncio.sleep(2 * QUICK.ack_wait_s)
            keeping.cancel()
            await kept.ack()

            assert (again.data, again.num_delivered) == (lost.data, 2)
            assert other.num_unseen == 1  # the same again, as `other` is as silent about it
            await other.finish(again)
            await until(lambda: is_empty(client, fleet), True)


async def test_a_request_that_is_given_back_is_handed_out_again(nats_url: str, fleet: str) -> None:
    """After nak a request goes to the next worker with room at once, after ack to none."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet) as worker:
        await until(lambda: exists_queue(client, fleet), True)
        await client.publish(b"x")
        first = await worker.take()
        worker.num_held -= 1
        await first.nak()
        worker.puller.wake()
        second = await worker.take()

        assert (second.data, second.num_delivered) == (b"x", 2)

        worker.num_held -= 1
        await second.nak(0.01)
        worker.puller.wake()
        third = await worker.take()

        assert third.num_delivered == 3

        await third.ack()
        await until(lambda: is_empty(client, fleet), True)


async def test_a_paused_worker_leaves_requests_to_others(nats_url: str, fleet: str) -> None:
    """What is published after a pause is handed to nobody in vain: the first delivery is to a worker that serves."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=9) as worker:
        await until(lambda: exists_queue(client, fleet), True)
        await until(lambda: num_pulls(client, fleet), 1)
        worker.puller.pause()
        await until(lambda: num_pulls(client, fleet), 0)
        await client.publish_all(*numbered(5))

        assert "paused" in repr(worker.puller)
        assert not await is_empty(client, fleet)

        worker.puller.resume()
        requests = [await worker.take() for _ in range(5)]

        assert [request.data for request in requests] == numbered(5)
        assert {request.num_delivered for request in requests} == {1}
        assert worker.puller.stats.given_back == 0


async def test_what_arrives_after_a_pause_is_given_back(nats_url: str, fleet: str) -> None:
    """Requests on their way to a worker as it pauses are not handed over, and go to another."""
    async with (
        publishing(nats_url, fleet) as client,
        pulling(nats_url, fleet) as worker,
        pulling(nats_url, fleet, capacity=0) as other,
    ):
        given_back: list[bytes] = []
        worker.puller.on_given_back = lambda request: given_back.append(request.data)
        await until(lambda: num_pulls(client, fleet), 1)
        worker.puller._is_paused = True  # as pause() does, before the pull could be withdrawn
        assert (await client.publish(b"x")).ok
        other.capacity = 1
        other.puller.wake()
        request = await other.take()

        assert (request.data, request.num_delivered) == (b"x", 2)
        assert (worker.puller.stats.given_back, worker.num_unseen) == (1, 0)
        assert given_back == [request.data]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["STREAM.DELETE.{name}", "CONSUMER.DELETE.{name}.normal"])
async def test_a_queue_that_disappears_is_made_anew(nats_url: str, fleet: str, what: str) -> None:
    """When somebody deletes a stream or consumer under a worker, new requests reach it nevertheless."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=100) as worker:
        await until(lambda: exists_queue(client, fleet), True)
        await client.publish(b"before")
        await worker.finish(await worker.take())
        await until(lambda: is_empty(client, fleet), True)
        name = stream_name(Subjects(fleet), MODEL, "normal")
        await ask(client.nats, what.format(name=name))
        while not (await client.publish(b"after")).ok:
            pass

        assert await worker.take_all(1) == [b"after"]
        assert worker.puller.stats.ensured == 2


@pytest.mark.slow
async def test_large_requests_pass(nats_url: str, fleet: str) -> None:
    """A backlog of more bytes than a server keeps for a connection is handed over whole, each request once."""
    data = bytes(range(256)) * (7 * 4096)
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*[data] * 15)
        async with pulling(nats_url, fleet, capacity=100) as worker:
            requests = [await worker.take() for _ in range(15)]

            assert all(request.data == data for request in requests)
            assert {request.num_delivered for request in requests} == {1}
            assert worker.nats.counters().dropped_msgs == worker.nats.counters().disconnects == 0


@pytest.mark.slow
async def test_large_requests_among_small_ones_pass(nats_url: str, fleet: str) -> None:
    """Pulls of many small requests leave out the larger ones, which come by the next pulls, in their order."""
    requests = [b"%d" % i + b"x" * (200_000 if i % 40 == 20 else 0) for i in range(120)]
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*requests)
        async with pulling(nats_url, fleet, capacity=1000) as worker:
            assert [(await worker.take()).data for _ in requests] == requests


@pytest.mark.slow
@pytest.mark.parametrize(("is_closed_here", "expected"), [(True, BusClosed), (False, BusBroken)])
async def test_a_connection_that_ended_ends_the_pulling(
    nats_url: str, fleet: str, is_closed_here: bool, expected: type[Exception]
) -> None:
    """Where the connection was closed, here or by the server for good, `run` raises what happened."""
    async with opened(nats_url) as nats:
        puller = QueuePuller(nats, Subjects(fleet), MODEL, room=lambda: 1, on_request=lambda _: None)

        async def end() -> None:
            await until_true(lambda: puller._plan.claimed == 4)
            if is_closed_here:
                await nats.shut()
            else:
                limit = nats.max_payload
                nats._max_payload = 2 * limit
                await nats.publish(fleet, bytes(limit + 1))

        async def pull_to_the_end() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(end())
                await puller.run()

        with pytest.raises(ExceptionGroup) as caught:
            await pull_to_the_end()

    (error,) = caught.value.exceptions
    assert isinstance(error, expected)


async def test_nothing_is_left_behind(nats_url: str, fleet: str) -> None:
    """A puller that was cancelled, pulling or paused, leaves no task, no subscription and no pull."""
    async with publishing(nats_url, fleet) as client:
        await exists_queue(client, fleet)  # nats-py keeps a task for answers to requests
        num_tasks = await count_tasks()
        for is_paused in (False, True):
            async with pulling(nats_url, fleet) as worker:
                await until(lambda: exists_queue(client, fleet), True)
                if is_paused:
                    worker.puller.pause()
            assert worker.puller._subscription is None
        assert await count_tasks() == num_tasks

        assert (await client.publish(b"x")).ok
        async with pulling(nats_url, fleet) as worker:
            assert (await worker.take()).num_delivered == 1
