"""Where the client sends requests: to the worker that has their prefix or their group, or to the queue."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.protocol.queue.placement import PlacementReason
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.fleet import check_generation, client_state, is_placing, synthetic_worker
from tests.support.hand_worker import HandWorker, Taken, chunk, failure, worker_by_hand
from tests.support.waits import SOON_S, until_true

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
    async with worker_by_hand(nats_url, fleet, "a") as a, worker_by_hand(nats_url, fleet, "b", pulls=False) as b:
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


# How followers of a group continue when their worker dies.


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


# On a fleet without a free slot, the prompt of each group is computed about once, also if workers fail meanwhile.


CONFIG = SyntheticConfig(
    step_s=0.002, max_num_seqs=4, prefix_cache=True, prefix_cache_tokens=200_000, num_experts=0, max_model_len=8192
)
GROUP = 8
PROMPT_TOKENS = 1024


def group(number: int, *, max_tokens: int = 16) -> GenerateRequest:
    """Return a request for eight samples of a prompt that no other group has."""
    prompt = [2 + number % 100, *([3 + number // 100] * (PROMPT_TOKENS - 1))]
    sampling = SamplingParams(n=GROUP, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, request_id=f"g{number}")


@contextlib.asynccontextmanager
async def fleet_of(
    url: str, fleet: str, count: int
) -> AsyncIterator[tuple[rollbus.Client, list[tuple[Worker, SyntheticEngine]]]]:
    """Start this number of workers with four slots each, and a client that knows them."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(synthetic_worker(url, fleet, config=CONFIG, worker_id=f"w{i}"))
            for i in range(count)
        ]
        rb = await stack.enter_async_context(rollbus.connect(url, fleet=fleet, client="me"))
        await rb.fleet.wait_for_workers(count)
        async with asyncio.timeout(SOON_S):
            yield rb, workers


def samples(results: Sequence[Generation]) -> list[Generation]:
    """Return all samples of these calls."""
    return [each for result in results for each in (result, *result.siblings)]


def num_waiting(workers: Sequence[tuple[Worker, SyntheticEngine]]) -> int:
    """Return the number of followers that wait at the workers."""
    return sum(int(worker.debug_state()["followers"]) for worker, _ in workers)


async def test_a_full_fleet_computes_each_prompt_about_once(nats_url: str, fleet: str) -> None:
    """Thirty concurrent groups for twelve slots compute each prompt about once.

    With the queue alone, two or three workers would compute each prompt.
    """
    async with fleet_of(nats_url, fleet, 3) as (rb, _), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(rb.complete(group(number))) for number in range(30)]
        results = [await call for call in calls]

    places = [{each.worker_ids for each in (result, *result.siblings)} for result in results]
    assert len(samples(results)) == 30 * GROUP
    assert sum(map(len, places)) <= 1.4 * len(places)


@pytest.mark.parametrize("event", ["pause", "drain", "stop", "kill", "fence", "weights"])
async def test_no_token_is_lost_if_a_worker_with_a_backlog_stops_or_pauses(
    nats_url: str, fleet: str, event: str
) -> None:
    """If a worker with waiting followers stops, dies, pauses or changes weights, no request loses a token."""
    with contextlib.ExitStack() as dying:
        if event == "kill":
            dying.enter_context(pytest.raises(ExceptionGroup, match="unhandled errors"))
        await have(event, nats_url, fleet)


async def have(event: str, url: str, fleet: str) -> None:
    """Let the event happen to a worker at which followers wait."""
    async with fleet_of(url, fleet, 2) as (rb, workers), asyncio.TaskGroup() as tasks:
        requests = [group(number, max_tokens=40) for number in range(10)]
        calls = [tasks.create_task(rb.complete(request)) for request in requests]
        await until_true(lambda: num_waiting(workers) > 0)
        worker, engine = next(each for each in workers if num_waiting([each]))
        match event:
            case "pause":
                await rb.fleet.pause()
                assert not num_waiting(workers)
                await rb.fleet.resume()
            case "drain":
                await rb.fleet.pause(mode="wait")
                assert not num_waiting(workers)
                await rb.fleet.resume()
            case "stop":
                worker.stop()
            case "kill":
                engine.kill()
            case "fence":
                worker._lifecycle.fence("by hand")
            case _:
                worker._in_flight.stop_intake()
                await worker._in_flight.pause_engine()
                await worker._in_flight.resume()
        for call, request in zip(calls, requests, strict=True):
            result = await call
            for each in (result, *result.siblings):
                assert len(each.token_ids) == 40
                check_generation(each, request, routing=False)


@pytest.mark.parametrize("has_backlog", [True, False])
async def test_a_turn_of_a_session_waits_at_its_full_worker(nats_url: str, fleet: str, has_backlog: bool) -> None:
    """The second turn goes to the full worker of the first, which may reject it, and then to the queue.

    With a worker of an earlier release, it goes to the queue at once.
    """
    turns = [tuple(range(1500)), tuple(range(1502))]
    options: dict[str, Any] = {"free_slots": 0, "has_backlog": has_backlog}
    async with scripted_workers(nats_url, fleet, **options) as both, asyncio.TaskGroup() as tasks:
        await both.announce(both.a, in_flight=4)
        first = tasks.create_task(both.rb.complete(long(prompt_token_ids=turns[0], session_id="s")))
        [queued] = await both.take_queued(1)
        await both.answer(both.a, queued)
        await first
        # The next presence has no free slot either.
        await both.announce(both.a)
        second = tasks.create_task(both.rb.complete(long(prompt_token_ids=turns[1], session_id="s")))
        if has_backlog:
            direct = await both.a.take()
            assert direct.queued is None
            assert direct.message.may_wait
            await both.frame(both.a, failure(direct.key, 0, ErrorCode.QUEUE_FULL), admitted=direct.keys)
        [again] = await both.take_queued(1)
        assert not again.message.may_wait
        await both.answer(both.a, again)
        await second

    kept = {PlacementReason.PLACED_SESSION: 1} if has_backlog else {}
    assert both.placed() == {PlacementReason.QUEUED: 2 - len(kept), **kept}
