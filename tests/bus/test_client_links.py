"""How a client handles missing, duplicate and reordered frames, and frames of another incarnation.

A scripted worker sends them.
"""

import asyncio
from functools import partial

import pytest

import rollbus
from rollbus.bus.client.links import MAX_WINDOW_BYTES
from rollbus.bus.nats.connection import publish, subscribe
from rollbus.schemas.presence import ClientState
from tests.support.hand_worker import chunk, hand_worker, request, worker_by_hand


@pytest.mark.proves("P57")
async def test_a_missing_frame_is_requested_again_and_completes_the_attempt(nats_url: str, fleet: str) -> None:
    """The client drops frames after a gap and requests them again immediately.

    The repeated frames complete the same attempt.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request()))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.frame(2, chunk(key, 2, 9, total=3))
        wanted = await worker.resend_wanted()
        await worker.frame(1, chunk(key, 1, 8))
        await worker.frame(2, chunk(key, 2, 9, total=3))
        generation = await completing
        stats = rb.stats()

    assert wanted.acked == 1
    assert list(generation.token_ids) == [7, 8, 9]
    assert generation.attempts == 1
    assert (stats.missing_frames, stats.attempts_lost) == (1, 0)
    assert stats.resends_asked >= 1


async def test_frames_for_an_earlier_client_of_the_same_name_are_ignored(nats_url: str, fleet: str) -> None:
    """The client ignores frames for an earlier client of the same name, and sends its own incarnation to the worker."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        mine, worker.client_incarnation = worker.client_incarnation, "older"
        await worker.frame(0, chunk(key, 0, 666, total=1), admitted=(key,))
        worker.client_incarnation = mine
        await worker.frame(0, chunk(key, 0, 7, total=1), admitted=(key,))
        generation = await completing
        assert rb.stats().stale_frames == 1
        assert (await worker.links.get()).client_incarnation == mine

    assert list(generation.token_ids) == [7]


async def test_credit_is_granted_for_received_frames_and_not_for_read_results(nats_url: str, fleet: str) -> None:
    """A caller that reads nothing delays no worker: the client acknowledges its frames and grants further credit."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        stream = rb.generate(request(1000))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(anext(stream))
            key = await worker.next_key()
            await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
            await first
        before = await worker.acked(1)
        for number in range(1, 200):
            await worker.frame(number, chunk(key, number, number))
        after = await worker.acked(200)
        rest = [await anext(stream) for _ in range(199)]

    assert after.credit > before.credit >= MAX_WINDOW_BYTES
    assert [chunk.token_ids[0] for chunk in rest] == list(range(1, 200))


async def test_frame_acks_are_repeated_every_second(nats_url: str, fleet: str) -> None:
    """Every second the client repeats the frame ack of each link, so a lost message does no harm."""
    async with hand_worker(nats_url, fleet) as (worker, _):
        await worker.frame(0)
        first = await worker.next_link()
        again = await worker.next_link()

    assert (first.acked, first.credit) == (again.acked, again.credit)


async def test_a_client_publishes_presence_until_its_close(nats_url: str, fleet: str) -> None:
    """A client publishes presence before its first request, then every second, and a last time when it closes."""
    async with worker_by_hand(nats_url, fleet) as worker:
        async with rollbus.connect(nats_url, fleet=fleet, client="me"):
            live = [await worker.presences.get() for _ in range(2)]
        closed = await worker.presences.get()
        while closed.state is ClientState.LIVE:
            closed = await worker.presences.get()
        async with rollbus.connect(nats_url, fleet=fleet, client="me"):
            reborn = await worker.presences.get()

    assert {presence.state for presence in live} == {ClientState.LIVE}
    assert (closed.state, closed.incarnation) == (ClientState.CLOSED, live[0].incarnation)
    assert reborn.incarnation != closed.incarnation


@pytest.mark.proves("P39")
@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"\x80", b"{}", b"\x93\x01\x02\x03", bytes(1000)])
async def test_garbage_on_a_link_is_counted(nats_url: str, fleet: str, garbage: bytes) -> None:
    """Bytes that are no frame increase a counter and have no other effect."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        await publish(worker.nats, worker.subjects.frame("me", "hand"), garbage)
        await worker.frame(0, chunk(key, 0, 7, total=1), admitted=(key,))
        await completing
        assert rb.stats().bad_messages == 1


async def test_frames_that_nats_py_drops_are_counted_and_requested_again(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nats-py drops frames of a full subscription, the client counts them and requests them again."""
    monkeypatch.setattr("rollbus.bus.client.runtime.subscribe", partial(subscribe, max_pending_msgs=3))
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(100)))
        key = await worker.next_key()
        await worker.frame(0, admitted=(key,))
        chunks = [chunk(key, index, index, **({"total": 100} if index == 99 else {})) for index in range(100)]
        # All frames arrive at once, and only a few of them fit into the subscription.
        for number in range(1, 101):
            await worker.frame(number, chunks[number - 1])
        while not (wanted := await worker.next_link()).resend:
            await worker.frame(101)
        while wanted.acked <= 100:
            # Send so few frames at a time that all of them fit.
            upto = min(wanted.acked + 3, 101)
            for number in range(wanted.acked, upto):
                await worker.frame(number, chunks[number - 1])
            wanted = await worker.acked(upto)
        await completing
        stats = rb.stats()

    assert list(completing.result().token_ids) == list(range(100))
    assert completing.result().attempts == 1
    assert stats.dropped_msgs > 50
    assert stats.resends_asked > 0
