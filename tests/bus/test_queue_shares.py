"""Each client has a share of a lane, so that other clients do not wait for all requests of a flooding client."""

import asyncio
import itertools

import pytest
from msgspec.structs import asdict

import rollbus
from rollbus.bus.queue.streams import RESUME_SHARE, QueueLimits, bounds_of_stream, ensure_queue, queue_depths
from rollbus.bus.subjects import LANES, Subjects
from tests.bus.queues import MODEL, publishing, pulling
from tests.control.support import ask as greedy
from tests.support.fleet import synthetic_worker
from tests.support.waits import until

SHARE = 5
LIMITS = QueueLimits(max_per_client=SHARE)


@pytest.mark.proves("P44")
async def test_a_flood_of_requests_waits_at_its_own_client(nats_url: str, fleet: str) -> None:
    """Bob's single request waits for at most one share of Alice's 200 requests.

    All requests are delivered, Alice's in order.
    """
    async with publishing(nats_url, fleet) as alice, publishing(nats_url, fleet, "bob") as bob:
        await ensure_queue(alice.nats, Subjects(fleet), MODEL, LIMITS)
        tokens = [await alice.send(b"%d" % number) for number in range(200)]
        for token in tokens[:SHARE]:
            assert (await alice.result(token)).ok
        assert (await bob.publish(b"bob")).ok
        async with pulling(nats_url, fleet, limits=LIMITS) as worker:
            taken = await worker.take_all(201)

        assert taken.index(b"bob") <= SHARE
        assert [number for number in taken if number != b"bob"] == [b"%d" % number for number in range(200)]
        assert all(alice.results[token][0].ok and len(alice.results[token]) == 1 for token in tokens)
        assert alice.publisher.stats.kept_back >= 1


async def test_a_full_share_delays_only_its_own_lane_and_model(nats_url: str, fleet: str) -> None:
    """A full share delays only its own lane and model, and the lane of resumed requests has a larger share."""
    subjects = Subjects(fleet)
    async with publishing(nats_url, fleet) as alice:
        for model in (MODEL, "other"):
            await ensure_queue(alice.nats, subjects, model, LIMITS)
        for _ in range(3 * SHARE):
            await alice.send()
            await alice.send(lane="resume")
        assert (await alice.publish(lane="high")).ok
        assert (await alice.publish(model="other")).ok
        for _ in range(RESUME_SHARE * SHARE):
            await alice.send(lane="resume")

        async def waiting() -> dict[str, int]:
            depths = await queue_depths(alice.nats, subjects, (MODEL,))
            return {depth.lane: depth.waiting for depth in depths}

        await until(waiting, {"resume": RESUME_SHARE * SHARE, "high": 1, "normal": SHARE, "low": 0})


async def test_a_request_that_the_client_keeps_back_can_be_removed(nats_url: str, fleet: str) -> None:
    """If a request that the client keeps back is removed, it is not published, and the later requests are."""
    async with publishing(nats_url, fleet) as alice:
        await ensure_queue(alice.nats, Subjects(fleet), MODEL, LIMITS)
        tokens = [await alice.send(b"%d" % number) for number in range(20)]
        for token in tokens[:SHARE]:
            assert (await alice.result(token)).ok
        for token in tokens[10:15]:
            alice.publisher.remove(token)
        async with pulling(nats_url, fleet, limits=LIMITS) as worker:
            taken = await worker.take_all(15)

    assert taken == [b"%d" % number for number in (*range(10), *range(15, 20))]


async def test_a_periodic_publication_finds_a_free_share(nats_url: str, fleet: str) -> None:
    """If the client learns of no worker that accepted its requests, a periodic publication finds the free share."""
    async with publishing(nats_url, fleet) as alice:
        await ensure_queue(alice.nats, Subjects(fleet), MODEL, QueueLimits(max_per_client=1))
        tokens = [await alice.send() for _ in range(3)]
        async with pulling(nats_url, fleet, limits=LIMITS) as worker:
            await worker.take_all(3)
        for token in tokens:
            assert (await alice.result(token)).ok


@pytest.mark.proves("P44")
async def test_a_client_that_floods_gets_all_its_results(nats_url: str, fleet: str) -> None:
    """If one of two clients sends fifty times its share, every request of both clients still gets its result."""
    async with (
        synthetic_worker(nats_url, fleet, model="m") as _worker,
        rollbus.connect(nats_url, fleet=fleet, client="alice") as alice,
        rollbus.connect(nats_url, fleet=fleet, client="bob") as bob,
        asyncio.TaskGroup() as tasks,
    ):
        await alice.fleet.wait_for_workers()
        await bob.fleet.wait_for_workers()
        asked = [tasks.create_task(alice.complete(greedy())) for _ in range(50 * SHARE)]
        asked += [tasks.create_task(bob.complete(greedy())) for _ in range(SHARE)]

    assert list(itertools.filterfalse(None, (one.result().error is None for one in asked))) == []


@pytest.mark.proves("P44")
def test_every_lane_of_a_stream_has_a_bound_for_each_client() -> None:
    """Every lane has a limit for each client. The lane of resumed requests has four times the share of other lanes."""
    bounds = {lane: bounds_of_stream(lane, asdict(LIMITS)) for lane in LANES}

    assert {lane: bound["max_msgs_per_subject"] for lane, bound in bounds.items()} == {
        "resume": 4 * SHARE,
        "high": SHARE,
        "normal": SHARE,
        "low": SHARE,
    }
    assert all(bound["discard_new_per_subject"] for bound in bounds.values())
