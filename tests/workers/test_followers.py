"""Requests that follow a group's request to its worker: they wait there for slots, and get them before the queue."""

import itertools
from functools import partial

import pytest

from rollbus.bus.protocol.queue.fairness import MAX_FOLLOWERS
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import RequestKey, Sibling
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.hand_client import HandClient
from tests.support.requests import endless, short
from tests.support.waits import until_true
from tests.workers.support import StartHeard

TWO_SLOTS = SyntheticConfig(step_s=0.01, max_num_seqs=2, max_model_len=10_000_000)


def running(client: HandClient) -> set[int]:
    """Return the children of `g` that have a token."""
    return {chunk.child for chunk in client.chunks["g"] if chunk.token_ids_data}


def refused(client: HandClient) -> dict[int, str]:
    """Return the error codes of the children of `g` that ended with an error."""
    return {chunk.child: chunk.error.code for chunk in client.chunks["g"] if chunk.error is not None}


def key(child: int) -> RequestKey:
    """Return the key of a sample of the group."""
    return RequestKey("g", 0, child)


async def lead(client: HandClient, num_followers: int) -> None:
    """Make the queue's first request lead group `g`, another request use the second slot, and others follow."""
    await client.enqueue(endless("g"))
    await client.enqueue(endless("other"))
    await client.until(lambda: len(client.offers) == 2)
    await follow(client, *range(1, num_followers + 1))


async def follow(client: HandClient, *children: int) -> None:
    """Send samples of the group that may wait directly to the worker."""
    first, *others = children
    await client.hand_over(endless("g"), "w", child=first, siblings=[Sibling(child) for child in others], may_wait=True)


async def test_followers_are_offered_at_once_and_get_the_next_slots(heard_worker: StartHeard) -> None:
    """Followers are offered immediately, and get the next free slots in their order, before queued requests."""
    async with heard_worker(config=TWO_SLOTS) as (client, worker, _):
        await lead(client, 2)
        await client.until(lambda: len(client.offers) == 4)
        await client.enqueue(short("queued"))
        assert running(client) <= {0}
        assert worker.presence().free_slots == 0
        await client.abort("w", RequestKey("other", 0, 0))
        await client.until(lambda: 1 in running(client))
        await client.abort("w", key(0))
        await client.until(lambda: 2 in running(client))
        assert not client.chunks["queued"]
        # Each follower is offered again when the engine gets it: before that, it cannot have killed the engine.
        assert [each for _, each in client.offers[2:]] == [key(1), key(2), key(1), key(2)]
        await client.abort("w", key(1))
        await client.until_ended("queued")
        await client.abort("w", key(2))
        counters = worker.presence().counters
        assert (counters.placed, counters.placements_refused) == (2, 0)


async def test_followers_need_a_leader_and_their_number_is_limited(heard_worker: StartHeard) -> None:
    """The number of waiting followers is limited per leader.

    A request of a group without a leader on this worker is rejected like any placed request.
    """
    async with heard_worker(config=TWO_SLOTS) as (client, worker, _):
        await lead(client, MAX_FOLLOWERS + 2)
        await client.until(lambda: len(refused(client)) == 2)
        assert refused(client) == dict.fromkeys((MAX_FOLLOWERS + 1, MAX_FOLLOWERS + 2), ErrorCode.QUEUE_FULL)
        await client.hand_over(endless("h"), "w", may_wait=True)
        await client.until_ended("h")
        await client.until(lambda: len(client.offers) == 2 + MAX_FOLLOWERS)
        # The place of an aborted follower is free. One that an admin aborts ends too, although no engine has it.
        await client.abort("w", *(key(child) for child in range(2, MAX_FOLLOWERS + 1)))
        await worker._in_flight.abort_and_wait([name for name in worker._links.requests.names if "/g/0/1/" in name])
        await client.until(lambda: any(chunk.child == 1 and chunk.is_terminal for chunk in client.chunks["g"]))
        await until_true(lambda: not worker.debug_state()["followers"])
        await client.abort("w", *(each for _, each in client.offers))


async def test_followers_without_a_free_slot_are_rejected_after_a_time(
    heard_worker: StartHeard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers are rejected after a time without a free slot. Running requests of the group continue."""
    monkeypatch.setattr("rollbus.bus.protocol.queue.fairness.STALLED_S", 0.1)
    async with heard_worker(config=TWO_SLOTS) as (client, worker, _):
        await lead(client, 2)
        await client.until(lambda: len(refused(client)) == 2)
        assert refused(client) == dict.fromkeys((1, 2), ErrorCode.QUEUE_FULL)
        assert worker.stats().intake.placements_refused == 2
        assert worker.presence().in_flight == 2
        await client.abort("w", key(0), RequestKey("other", 0, 0))


async def test_a_worker_that_stops_its_intake_rejects_its_waiting_followers(heard_worker: StartHeard) -> None:
    """A worker rejects its waiting followers before it pauses, drains or loads weights, so that others get them."""
    async with heard_worker(config=TWO_SLOTS) as (client, worker, _):
        await lead(client, 2)
        await client.until(lambda: len(client.offers) == 4)
        worker._in_flight.stop_intake()
        await client.until(lambda: len(refused(client)) == 2)
        assert worker.presence().in_flight == 2
        await client.abort("w", key(0), RequestKey("other", 0, 0))


async def test_samples_of_a_placed_message_without_a_slot_follow_the_other_samples(heard_worker: StartHeard) -> None:
    """If the client allows it, samples of a placed message without a slot follow those with a slot."""
    async with heard_worker(config=TWO_SLOTS) as (client, worker, _):
        await until_true(lambda: worker.debug_state()["lanes_waiting"] == "")
        await follow(client, 0, 1, 2)
        await client.until(lambda: len(client.offers) == 5 and running(client) == {0, 1})
        assert [each.child for _, each in client.offers] == [0, 0, 1, 2, 1]
        await client.abort("w", key(0))
        await client.until(lambda: running(client) == {0, 1, 2})
        assert not refused(client)
        await client.abort("w", key(1), key(2))


@pytest.mark.slow
async def test_turns_of_sessions_wait_for_every_second_slot(
    heard_worker: StartHeard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of sessions that may wait take at most every second slot from the queue. They get half of the places.

    Requests without a session are rejected.
    """
    monkeypatch.setattr("rollbus.bus.protocol.queue.fairness.STALLED_S", 600.0)
    config = SyntheticConfig(step_s=0.01, max_num_seqs=1, max_model_len=10_000_000)
    async with heard_worker(config=config) as (client, worker, _):
        await client.enqueue(endless("first"))
        await client.until(lambda: len(client.offers) == 1)
        await client.enqueue(endless("queued"))
        for name in ("turn-0", "turn-1"):
            await client.hand_over(endless(name, session_id=name), "w", may_wait=True)
        await client.hand_over(endless("plain"), "w", may_wait=True)
        await client.until_ended("plain")
        assert client.error_of("plain") == ErrorCode.QUEUE_FULL
        # The worker has not pulled for a second, so it must expect that requests wait in the queue.
        await until_true(lambda: worker.debug_state()["lanes_waiting"] == "unknown")
        for ended, begun in itertools.pairwise(["first", "turn-0", "queued", "turn-1"]):
            assert not client.chunks[begun]
            await client.abort("w", RequestKey(ended, 0, 0))
            await client.until(partial(client.chunks.__getitem__, begun))
        names = [f"more-{number}" for number in range(MAX_FOLLOWERS // 2 + 2)]
        for name in names:
            await client.hand_over(short(name, session_id="s"), "w", may_wait=True)
        await client.until_ended(names[-1])
        assert client.error_of(names[-1]) == ErrorCode.QUEUE_FULL
        await client.abort("w", RequestKey("turn-1", 0, 0))
        await client.until_ended(*names)
        assert {client.error_of(name) for name in names[:-1]} == {None}
