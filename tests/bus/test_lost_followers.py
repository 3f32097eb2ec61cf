"""How followers of a group continue when their worker dies."""

import asyncio

from rollbus.schemas.presence import WorkerState
from tests.bus.test_placement import long, scripted_workers
from tests.support.fleet_states import is_placing
from tests.support.hand_worker import chunk


async def test_unoffered_followers_of_a_dead_worker_are_published_again(nats_url: str, fleet: str) -> None:
    """If the worker of a group dies, its running requests resume.

    The client publishes requests again that the worker had not offered.
    """
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(3)))
        [first] = await both.take_queued(1)
        await both.frame(both.a, admitted=[first.key])
        await both.a.take()
        await both.a.announce(WorkerState.STOPPED)
        again = await both.take_queued(2)
        await both.announce(both.b, free_slots=8)
        for each in again:
            await both.answer(both.b, each)
        worker, last = await both.take_direct()
        await both.answer(worker, last)
        generation = await completing
        assert not is_placing(both.rb)

    assert sorted(each.attempts for each in (generation, *generation.siblings)) == [1, 1, 2]


async def test_followers_that_only_waited_are_no_suspects(nats_url: str, fleet: str) -> None:
    """If an engine dies, the client tries its samples without a token one at a time.

    Samples that only waited follow immediately.
    """
    async with scripted_workers(nats_url, fleet, free_slots=0) as both, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(both.rb.complete(long(6, max_tokens=2)))
        [first] = await both.take_queued(1)
        await both.frame(both.a, chunk(first.key, 0, 7), admitted=[first.key])
        others = await both.a.take()
        begun, waiting = others.keys[:2], others.keys[2:]
        await both.frame(both.a, admitted=others.keys)
        await both.frame(both.a, admitted=begun)
        await both.a.acked(3)
        await both.a.announce(WorkerState.FAILED)
        again = await both.take_queued(2 + len(waiting))
        await both.announce(both.b, free_slots=8)
        for each in again:
            rest = [7] * (each.request.sampling.max_tokens or 0)
            await both.frame(both.b, chunk(each.key, 0, *rest, total=len(rest)), admitted=[each.key])
        [last] = await both.take_queued(1)
        await both.frame(both.b, chunk(last.key, 0, 7, 7, total=2), admitted=[last.key])
        await completing

    on_trial = [each.key.child for each in (*again, last) if each.key.child in {key.child for key in begun}]
    assert on_trial == [key.child for key in begun]
    assert last.key.child == begun[1].child
