"""Pulls from the queue: lanes in order, no more requests than free slots, and no lost deliveries."""

import asyncio

import pytest

from rollbus.bus.nats.client import Message
from rollbus.bus.nats.connection import publish, subscribe
from rollbus.bus.nats.jetstream import ApiError, ask
from rollbus.bus.protocol.queue.pull_plan import MAX_OVER
from rollbus.bus.queue.puller import QueuedRequest, QueuePuller
from rollbus.bus.queue.streams import QueueLimits, ensure_queue, queue_depths, stream_name
from rollbus.bus.subjects import LANES, Subjects
from rollbus.schemas.errors import BusBroken, BusClosed, RemoteProtocolError
from tests.bus.queues import MODEL, Publishing, publishing, pulling
from tests.support.nats_server import count_tasks, opened
from tests.support.waits import until, until_true

QUICK = QueueLimits(ack_wait_s=0.5)
"""For tests in which a worker sends no further acks."""


def numbered(count: int) -> list[bytes]:
    """Return the contents of this number of requests."""
    return [str(i).encode() for i in range(count)]


async def is_empty(client: Publishing, fleet: str) -> bool:
    """Return True if no request waits and none is pulled without an ack."""
    depths = await queue_depths(client.nats, Subjects(fleet), (MODEL,))
    return not any(depth.waiting or depth.in_hand for depth in depths)


async def exists_queue(client: Publishing, fleet: str) -> bool:
    """Return True if a worker has created all lanes of the queue."""
    return len(await queue_depths(client.nats, Subjects(fleet), (MODEL,))) == len(LANES)


async def num_pulls(client: Publishing, fleet: str) -> int:
    """Return the number of waiting pulls on the lane `normal`, or 0 if no worker has created the queue."""
    name = stream_name(Subjects(fleet), MODEL, "normal")
    try:
        return int((await ask(client.nats, f"CONSUMER.INFO.{name}.normal")).get("num_waiting", 0))
    except ApiError:
        return 0


@pytest.mark.proves("P40")
async def test_a_lane_is_first_in_first_out(nats_url: str, fleet: str) -> None:
    """Requests of a lane are delivered in the order of their publication, each once."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*numbered(1000))
        async with pulling(nats_url, fleet, capacity=7) as worker:
            assert await worker.take_all(1000) == numbered(1000)
            await until(lambda: is_empty(client, fleet), True)

            assert worker.puller.stats.handed_over == 1000


@pytest.mark.proves("P40")
async def test_each_lane_gets_its_turns_and_the_rest_is_strict(nats_url: str, fleet: str) -> None:
    """Of eight requests, a worker pulls one of each lane, and five of `resume`; if that is empty, six of `high`."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        for lane in reversed(LANES):
            await client.publish_all(*[lane.encode()] * 20, lane=lane)
        async with pulling(nats_url, fleet, capacity=1) as worker:
            taken = [lane.decode() for lane in await worker.take_all(80)]

    assert [taken[:32].count(lane) for lane in LANES] == [20, 4, 4, 4]
    assert [taken[32:48].count(lane) for lane in LANES] == [0, 12, 2, 2]
    assert set(taken[60:]) == {"normal", "low"}


async def test_an_idle_worker_receives_one_request_for_each_pull(nats_url: str, fleet: str) -> None:
    """An idle worker receives requests of any lane, one for each pull, with their client, lane, subject and counts."""
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


@pytest.mark.parametrize(
    "reply",
    [
        *(f"$JS.ACK.s{gap}.normal.1.1.1.1.0" for gap in ("\xa0", "\x85", "\x1c")),
        "rb.v1.f.link.alice.w",
        "victim.ACK.s.normal.1.1.1.1.0",
        "$JS.ACK.s.normal.1.1.1.1",
        "$JS.ACK.s.other.1.1.1.1.0",
        "$JS.ACK.s.normal.x.1.1.1.0",
        f"$JS.ACK.s.normal.1.1.1.{'1' * 5000}.0",
        "$JS.ACK.>.normal.1.1.1.1.0",
        "$JS.ACK.domain.s.normal.1.1.1.1.0",
    ],
)
async def test_a_request_that_the_queue_has_not_delivered_is_refused(nats_url: str, reply: str) -> None:
    """A forged reply subject fails its own message: no ack goes to it, and the acks of other requests are sent."""
    async with opened(nats_url) as nats:
        message = Message(nats, 1, "rb.v1.f.req.alice.m.normal", reply, None, b"")
        with pytest.raises(RemoteProtocolError, match="reply subject"):
            QueuedRequest(nats, message)


@pytest.mark.parametrize(("before", "after"), [("", ""), ("domain.hash.", ""), ("_.hash.", ".token")])
async def test_reply_subjects_of_all_servers_are_read(nats_url: str, before: str, after: str) -> None:
    """The counts of a delivery are read with and without a domain, and with fields of later servers."""
    async with opened(nats_url) as nats:
        reply = f"$JS.ACK.{before}s.high.2.7.8.1500000000.9{after}"
        request = QueuedRequest(nats, Message(nats, 1, "rb.v1.f.req.alice.m.high", reply, None, b""))

        assert (request.client, request.lane, request.num_delivered) == ("alice", "high", 2)
        assert (request.published_at, request.num_pending) == (1.5, 9)


async def test_forged_messages_in_the_inbox_are_counted_and_get_no_ack(nats_url: str, fleet: str) -> None:
    """The worker sends no ack for messages of other programs in its inbox, and pulls the next request as before."""
    acked: list[object] = []
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=2) as worker:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(b"first")
        assert await worker.take_all(1) == [b"first"]
        await subscribe(client.nats, "victim", acked.append)
        for name, reply in (("1", "victim"), ("x", "")):
            await publish(client.nats, f"{worker.puller._inbox}.{name}", b"", reply=reply)
        await until_true(lambda: worker.puller.rejected.so_far == 2)
        await client.publish_all(b"next")

        assert (await worker.take()).data == b"next"
        assert not acked


async def test_a_worker_receives_at_most_three_requests_beyond_its_free_slots(nats_url: str, fleet: str) -> None:
    """With any number of waiting requests, a worker receives at most three more requests than it has free slots."""
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
    """Each request goes to one worker. A full worker leaves the other requests to the second worker."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*numbered(10))
        async with pulling(nats_url, fleet, capacity=4) as one:
            held = [(await one.take()).data for _ in range(4)]
            async with pulling(nats_url, fleet, capacity=10) as other:
                rest = [(await other.take()).data for _ in range(6)]

    assert sorted(held + rest) == sorted(numbered(10))


async def test_requests_of_a_silent_worker_go_to_another_worker(nats_url: str, fleet: str) -> None:
    """A request without an ack is delivered to another worker, unless its worker sends in-progress acks."""
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
            # Longer than the queue waits for an ack.
            await asyncio.sleep(2 * QUICK.ack_wait_s)
            keeping.cancel()
            await kept.ack()

            assert (again.data, again.num_delivered) == (lost.data, 2)
            assert other.num_unseen == 1  # `other` got the request again, because it has not acked it either
            await other.finish(again)
            await until(lambda: is_empty(client, fleet), True)


async def test_a_request_is_delivered_again_after_a_nak(nats_url: str, fleet: str) -> None:
    """After a nak, the queue delivers a request to the next worker with free slots. After an ack, it does not."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet) as worker:
        await until(lambda: exists_queue(client, fleet), True)
        await client.publish_all(b"x")
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


async def test_a_paused_worker_leaves_requests_to_workers_that_serve(nats_url: str, fleet: str) -> None:
    """A request that is published after a pause is first delivered to a worker that serves."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=9) as worker:
        await until(lambda: exists_queue(client, fleet), True)
        await until(lambda: num_pulls(client, fleet), 1)
        worker.puller.pause()
        await until(lambda: num_pulls(client, fleet), 0)
        await client.publish_all(*numbered(5))

        assert not await is_empty(client, fleet)

        worker.puller.resume()
        requests = [await worker.take() for _ in range(5)]

        assert [request.data for request in requests] == numbered(5)
        assert {request.num_delivered for request in requests} == {1}
        assert worker.puller.stats.given_back == 0


async def test_a_request_that_arrives_after_a_pause_goes_to_another_worker(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a request is on its way to a worker that pauses, the worker returns it, and another worker receives it."""
    async with (
        publishing(nats_url, fleet) as client,
        pulling(nats_url, fleet) as worker,
        pulling(nats_url, fleet, capacity=0) as other,
    ):
        given_back: list[bytes] = []
        receive = worker.puller._receive_request

        def pause_first(message: Message) -> None:
            # Pause between the server's delivery and its receipt. After an earlier pause, the end of another pull may
            # wake the puller, which then withdraws its pulls before the request arrives.
            worker.puller.pause()
            receive(message)

        monkeypatch.setattr(worker.puller, "_receive_request", pause_first)
        worker.puller.on_given_back = lambda request: given_back.append(request.data)
        await until(lambda: exists_queue(client, fleet), True)
        assert (await client.publish(b"x")).ok
        await until_true(lambda: given_back)
        other.capacity = 1
        other.puller.wake()
        request = await other.take()

        assert (request.data, request.num_delivered) == (b"x", 2)
        assert (worker.puller.stats.given_back, worker.num_unseen) == (1, 0)
        assert given_back == [request.data]


@pytest.mark.parametrize("what", ["STREAM.DELETE.{name}", "CONSUMER.DELETE.{name}.normal"])
async def test_a_deleted_stream_or_consumer_is_created_again(nats_url: str, fleet: str, what: str) -> None:
    """If a stream or a consumer is deleted, the worker creates it again, and new requests arrive."""
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


async def test_a_backlog_larger_than_the_server_buffer_is_delivered_completely(nats_url: str, fleet: str) -> None:
    """A backlog with more bytes than the server buffers for a connection is delivered completely, each request once."""
    data = bytes(range(256)) * (7 * 4096)
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*[data] * 15)
        async with pulling(nats_url, fleet, capacity=100) as worker:
            requests = [await worker.take() for _ in range(15)]

            assert all(request.data == data for request in requests)
            assert {request.num_delivered for request in requests} == {1}
            assert worker.nats.counters().dropped_msgs == worker.nats.counters().disconnects == 0


async def test_large_requests_among_small_requests_are_delivered_in_order(nats_url: str, fleet: str) -> None:
    """Pulls for many small requests skip larger ones. The next pulls deliver the larger ones in their order."""
    requests = [b"%d" % i + b"x" * (200_000 if i % 40 == 20 else 0) for i in range(120)]
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        await client.publish_all(*requests)
        async with pulling(nats_url, fleet, capacity=1000) as worker:
            assert [(await worker.take()).data for _ in requests] == requests


@pytest.mark.parametrize(("is_closed_here", "expected"), [(True, BusClosed), (False, BusBroken)])
async def test_a_closed_connection_ends_the_puller_with_an_error(
    nats_url: str, fleet: str, is_closed_here: bool, expected: type[Exception]
) -> None:
    """If the client or the server closes the connection, `run` raises the matching error."""
    async with opened(nats_url) as nats:
        puller = QueuePuller(nats, Subjects(fleet), MODEL, room=lambda: 1, on_request=lambda _: None)

        async def end() -> None:
            await until_true(lambda: sum(state.left for state in puller._plan._lanes.values()) == 4)
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


async def test_a_cancelled_puller_leaves_no_task_subscription_or_pull(nats_url: str, fleet: str) -> None:
    """A puller that is cancelled while it pulls or is paused leaves no task, subscription or pull."""
    async with publishing(nats_url, fleet) as client:
        await exists_queue(client, fleet)  # nats-py starts a permanent task for answers with the first request
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
