"""Where the client sends requests: to the worker that has their prefix or their group, or to the queue."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.protocol.queue.placement import PlacementReason
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import ErrorCode
from tests.support.fleet_states import client_state, is_placing
from tests.support.hand_worker import HandWorker, Taken, chunk, failure, worker_by_hand
from tests.support.patience import SOON_S
from tests.support.waits import until_true

PROMPT = tuple(range(600))
"""Two blocks and a part of a third block."""


def long(n: int = 1, *, max_tokens: int = 1, seed: int | None = None, **fields: Any) -> GenerateRequest:
    """Return a request whose prompt is long enough for placement."""
    sampling = SamplingParams(n=n, max_tokens=max_tokens, temperature=0, seed=seed, logprobs=None)
    return GenerateRequest(**{"prompt_token_ids": PROMPT, "sampling": sampling, **fields})


class ScriptedWorkers:
    """The scripted workers `a` and `b`, of which only `a` pulls, and the client `me`."""

    def __init__(self, a: HandWorker, b: HandWorker, rb: rollbus.Client) -> None:
        self.a, self.b, self.rb = a, b, rb
        self.stats = rb.stats
        self._numbers = {"a": 0, "b": 0}

    async def frame(self, worker: HandWorker, *chunks: Chunk, admitted: Any = ()) -> None:
        """Send the next frame of a worker."""
        worker.client_incarnation = self.a.client_incarnation or self.b.client_incarnation
        number = self._numbers[worker.name]
        self._numbers[worker.name] += 1
        await worker.frame(number, *chunks, admitted=tuple(admitted))

    async def answer(self, worker: HandWorker, taken: Taken) -> None:
        """Accept all samples of a message, and end each with one token."""
        await self.frame(worker, *(chunk(key, 0, 7, total=1) for key in taken.keys), admitted=taken.keys)

    async def admit(self, worker: HandWorker, taken: Taken) -> None:
        """Accept a queued request, and wait until the client has processed the frame.

        The wait is necessary because presence uses another subject.
        """
        await self.frame(worker, admitted=[taken.key])
        await until_true(lambda: client_state(self.rb)["placed"] == 1)

    async def take_direct(self) -> tuple[HandWorker, Taken]:
        """Return the next request, which must be sent directly, and its worker."""
        worker, taken = await self.take()
        assert taken.queued is None
        return worker, taken

    async def take(self) -> tuple[HandWorker, Taken]:
        """Return the next request that reaches either worker."""
        await until_true(lambda: self.a.requests.qsize() + self.b.requests.qsize())
        worker = self.a if self.a.requests.qsize() else self.b
        return worker, await worker.take()

    async def take_queued(self, count: int) -> list[Taken]:
        """Return the next requests, which must arrive through the queue."""
        taken = [await self.a.take() for _ in range(count)]
        assert all(each.queued is not None for each in taken)
        return taken

    async def announce(self, worker: HandWorker, **fields: Any) -> None:
        """Publish presence of a worker with these changes, and wait until the client has received it."""
        for name, value in fields.items():
            setattr(worker, name, value)
        await worker.announce()
        await self.rb.fleet.state()

    def placed(self) -> dict[str, int]:
        """Return the number of requests by placement reason, without zeros."""
        return {reason: count for reason, count in self.stats().placed.items() if count}


@contextlib.asynccontextmanager
async def scripted_workers(
    nats_url: str, fleet: str, *, free_slots: int = 8, has_backlog: bool = True, **options: Any
) -> AsyncIterator[ScriptedWorkers]:
    """Start two scripted workers that accept siblings, and a client with these options that knows them."""
    async with (
        worker_by_hand(nats_url, fleet, "a") as a,
        worker_by_hand(nats_url, fleet, "b", pulls=False) as b,
    ):
        for worker in (a, b):
            worker.free_slots, worker.reads_siblings, worker.has_backlog = free_slots, True, has_backlog
        async with rollbus.connect(nats_url, fleet=fleet, client="me", **options) as rb, asyncio.timeout(SOON_S):
            await rb.fleet.wait_for_workers(2)
            both = ScriptedWorkers(a, b, rb)
            yield both
            last = rb.stats()
            both.stats = lambda: last


async def test_samples_go_to_one_worker_in_one_message(nats_url: str, fleet: str) -> None:
    """With enough free slots, all samples of a request are sent to one worker in one message with the seeds of all."""
    async with scripted_workers(nats_url, fleet) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(4, seed=5)))
        worker, taken = await both.take_direct()
        await both.answer(worker, taken)
        generation = await completing
        stats = both.stats()
        assert not is_placing(both.rb)

    assert taken.request.sampling.seed == 5
    assert taken.message.placed_for == PlacementReason.PLACED_GROUP
    assert [(other.child, other.seed) for other in taken.message.siblings] == [(1, 6), (2, 7), (3, 8)]
    assert {each.worker_ids for each in (generation, *generation.siblings)} == {(worker.name,)}
    assert (stats.requests, stats.direct, both.placed()) == (4, 4, {PlacementReason.PLACED_GROUP: 4})


async def test_the_first_of_the_rejected_samples_goes_to_the_queue(nats_url: str, fleet: str) -> None:
    """If a worker rejects some samples, the first of them goes to the queue as the leader, and the others follow it."""
    async with scripted_workers(nats_url, fleet) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(3)))
        worker, taken = await both.take_direct()
        one, two, three = taken.keys
        full = [failure(key, 0, ErrorCode.QUEUE_FULL) for key in (two, three)]
        await both.frame(worker, chunk(one, 0, 7, total=1), *full, admitted=[one])
        [leader] = await both.take_queued(1)
        await both.answer(both.a, leader)
        worker, last = await both.take_direct()
        await both.answer(worker, last)
        generation = await completing
        assert both.rb.stats().placements_refused == 2
        assert not is_placing(both.rb)

    assert [each.attempts for each in (generation, *generation.siblings)] == [1, 1, 1]
    assert both.placed() == {PlacementReason.PLACED_GROUP: 4}


async def test_a_prefix_is_placed_until_its_cache_is_emptied(nats_url: str, fleet: str) -> None:
    """The second turn goes to the worker of the first turn.

    After that worker has emptied its cache, the third goes to the queue.
    """
    async with scripted_workers(nats_url, fleet) as both, asyncio.TaskGroup() as tasks:
        turns = [PROMPT, (*PROMPT, *range(300)), (*PROMPT, *range(500))]
        requests = [long(prompt_token_ids=turn) for turn in turns]
        first = tasks.create_task(both.rb.complete(requests[0]))
        [queued] = await both.take_queued(1)
        await both.answer(both.a, queued)
        await first
        second = tasks.create_task(both.rb.complete(requests[1]))
        worker, direct = await both.take_direct()
        await both.answer(worker, direct)
        await second
        await both.announce(both.a, cache_epoch=1)
        third = tasks.create_task(both.rb.complete(requests[2]))
        [again] = await both.take_queued(1)
        await both.answer(both.a, again)
        await third

    assert worker.name == "a"
    assert both.placed() == {PlacementReason.QUEUED: 2, PlacementReason.PLACED_PREFIX: 1}


@pytest.mark.parametrize("group_id", [None, "g"])
async def test_without_free_slots_followers_go_to_the_worker_of_the_leader(
    nats_url: str, fleet: str, group_id: str | None
) -> None:
    """Without free slots, only the first request is in the queue.

    The worker that accepts it gets the others, which may wait there.
    """
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        completing = start(tasks, both.rb, group_id)
        [first] = await both.take_queued(1)
        await until_true(lambda: client_state(both.rb)["followers"] == 2)
        await both.frame(both.a, admitted=[first.key])
        others = [await both.a.take() for _ in range(1 if group_id is None else 2)]
        assert all(each.queued is None and each.message.may_wait for each in others)
        await both.frame(both.a, chunk(first.key, 0, 7, 7, total=2))
        for each in others:
            await both.frame(both.a, *(chunk(key, 0, 7, 7, total=2) for key in each.keys), admitted=each.keys)
        results = [await task for task in completing]
        assert not is_placing(both.rb)

    assert not first.message.may_wait
    assert not first.message.placed_for
    assert sum(len(each.keys) for each in others) == 2
    assert sum(1 + len(result.siblings) for result in results) == 3
    assert both.placed() == {PlacementReason.QUEUED: 1, PlacementReason.PLACED_GROUP: 2}


def start(tasks: asyncio.TaskGroup, rb: rollbus.Client, group_id: str | None) -> list[asyncio.Task[Generation]]:
    """Start three requests of one group: samples of one call, or separate calls with this group id."""
    if group_id is None:
        return [tasks.create_task(rb.complete(long(3, max_tokens=2)))]
    return [tasks.create_task(rb.complete(long(max_tokens=2, group_id=group_id))) for _ in range(3)]


async def test_followers_go_to_a_worker_that_announces_slots_for_all(nats_url: str, fleet: str) -> None:
    """If another worker announces slots for all followers, and no leader waits in the queue, the followers go there."""
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(3)))
        [first] = await both.take_queued(1)
        await both.announce(both.b, free_slots=8)
        await both.answer(both.a, first)
        worker, others = await both.take_direct()
        await both.answer(worker, others)
        await completing

    assert (worker.name, len(others.keys)) == ("b", 2)


async def test_a_worker_without_a_backlog_gets_no_more_than_its_free_slots(nats_url: str, fleet: str) -> None:
    """Workers of an earlier release, without a backlog, get no followers beyond their free slots.

    Those go to the queue.
    """
    async with scripted_workers(nats_url, fleet, free_slots=0, has_backlog=False) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(3)))
        [first] = await both.take_queued(1)
        await both.answer(both.a, first)
        for each in await both.take_queued(2):
            assert not each.message.may_wait
            await both.answer(both.a, each)
        await completing
        assert not is_placing(both.rb)


@pytest.mark.parametrize("is_offered", [True, False])
async def test_rejected_followers_get_another_leader_and_then_go_to_the_queue(
    nats_url: str, fleet: str, is_offered: bool
) -> None:
    """Rejected followers get another leader, before or after a wait. After a second rejection, they go to the queue."""
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(4)))
        [first] = await both.take_queued(1)
        await both.answer(both.a, first)
        for _ in range(2):
            others = await both.a.take()
            assert others.queued is None
            if is_offered:
                await both.frame(both.a, admitted=others.keys)
            await both.frame(both.a, *(failure(key, 0, ErrorCode.QUEUE_FULL) for key in others.keys))
            if len(others.keys) == 3:
                [leader] = await both.take_queued(1)
                await both.answer(both.a, leader)
        for each in await both.take_queued(2):
            await both.answer(both.a, each)
        generation = await completing
        assert both.rb.stats().placements_refused == 5
        assert not is_placing(both.rb)

    assert [each.attempts for each in (generation, *generation.siblings)] == [1] * 4
    assert [each.worker_ids for each in (generation, *generation.siblings)] == [("a",)] * 4


async def test_followers_of_a_cancelled_leader_get_another_leader(nats_url: str, fleet: str) -> None:
    """If the caller cancels a leader before a worker accepts it, the next request of the group becomes the leader."""
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        first, *others = start(tasks, both.rb, "g")
        await both.take_queued(1)
        await until_true(lambda: client_state(both.rb)["followers"] == 2)
        first.cancel()
        [leader] = await both.take_queued(1)
        await both.answer(both.a, leader)
        worker, last = await both.take_direct()
        await both.answer(worker, last)
        await asyncio.wait(others)
        assert not is_placing(both.rb)


@pytest.mark.parametrize("ending", ["abort", "leave", "timeout"])
async def test_waiting_followers_that_end_are_never_published(nats_url: str, fleet: str, ending: str) -> None:
    """Waiting followers that are aborted, abandoned or timed out are never published, and the client removes them."""
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        timeout_s = 0.5 if ending == "timeout" else None
        first = tasks.create_task(both.rb.complete(long(group_id="g")))
        [led] = await both.take_queued(1)
        call = long(2, request_id="r", group_id="g", timeout_s=timeout_s)
        others = tasks.create_task(outcome(both.rb.complete(call)))
        await until_true(lambda: client_state(both.rb)["followers"] == 2 or others.done())
        if ending == "abort":
            await both.rb.abort(["r"])
        elif ending == "leave":
            others.cancel()
        await asyncio.wait([others])
        await until_true(lambda: client_state(both.rb)["followers"] == 0)
        await both.answer(both.a, led)
        await first
        assert not is_placing(both.rb)
        assert both.a.requests.empty()
        after = tasks.create_task(both.rb.complete(long(prompt_token_ids=[1])))
        await both.answer(both.a, (await both.take_queued(1))[0])
        await after


async def test_a_silent_worker_gets_no_more_requests_with_its_prefix(nats_url: str, fleet: str) -> None:
    """A worker that does not answer costs one wait. After that, requests with its prefix go to the queue."""
    async with scripted_workers(nats_url, fleet) as both, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(both.rb.complete(long()))
        await both.answer(both.a, (await both.take_queued(1))[0])
        await first
        second = tasks.create_task(both.rb.complete(long()))
        worker, direct = await both.take_direct()
        [queued] = await both.take_queued(1)
        await both.answer(both.a, queued)
        await second
        third = tasks.create_task(both.rb.complete(long()))
        await both.answer(both.a, (await both.take_queued(1))[0])
        await third

    assert (worker.name, direct.key.attempt, queued.key.attempt) == ("a", 0, 1)
    assert both.placed() == {PlacementReason.QUEUED: 2, PlacementReason.PLACED_PREFIX: 1}


async def test_without_placement_all_requests_go_through_the_queue(nats_url: str, fleet: str) -> None:
    """With placement disabled, samples, sessions and known prefixes all go through the queue."""
    async with scripted_workers(nats_url, fleet, placement=False) as both, asyncio.TaskGroup() as tasks:
        for request, count in ((long(3), 3), (long(session_id="s"), 1), (long(session_id="s"), 1)):
            completing = tasks.create_task(both.rb.complete(request))
            for each in await both.take_queued(count):
                await both.answer(both.a, each)
            await completing
        assert (both.rb.stats().direct, both.placed()) == (0, {})


async def outcome(awaitable: Awaitable[Generation]) -> None:
    """Wait for the end of a request, and ignore its error."""
    with contextlib.suppress(rollbus.RequestError):
        await awaitable
