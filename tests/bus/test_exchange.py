"""Which attempt and which worker are current after offers, new incarnations and losses.

A scripted worker sends the frames.
"""

import asyncio

import pytest

from rollbus import GenerateRequest, RequestFailed, SamplingParams
from rollbus.bus.client.client import runtime_of
from rollbus.bus.client.links import ClientLinks
from rollbus.bus.nats.connection import publish
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import Frame, RequestKey, encode
from rollbus.schemas.presence import WorkerState
from tests.support.hand_worker import chunk, failure, hand_worker, request
from tests.support.requests import all_of, error_of
from tests.support.waits import until_true


async def test_a_request_is_published_offered_acknowledged_and_finished(nats_url: str, fleet: str) -> None:
    """In the normal case, a request is published once, offered, acknowledged and finished."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request()))
        taken = await worker.take()
        key = taken.key
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.frame(1, chunk(key, 1, 8, 9, total=3))
        generation = await completing
        acknowledged = await worker.acked(2)
        stats = rb.stats()

    assert list(taken.request.prompt_token_ids) == [1, 2]
    assert list(generation.token_ids) == [7, 8, 9]
    assert (generation.attempts, generation.worker_ids) == (1, ("hand",))
    assert acknowledged.abort == []
    assert (stats.requests, stats.frames, stats.attempts_lost, stats.late_chunks) == (1, 2, 0, 0)


async def test_the_tokens_of_open_calls_are_counted_as_they_come(nats_url: str, fleet: str) -> None:
    """Tokens count before their request ends, and until the caller has left its call."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        calls = runtime_of(rb).coordinator
        completing = tasks.create_task(rb.complete(request()))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7, 8), admitted=(key,))
        await until_true(lambda: calls.num_tokens == 2)
        assert not completing.done()
        await worker.frame(1, chunk(key, 1, 9, total=3))
        await completing
        await until_true(lambda: calls.num_tokens == 0)


async def test_requests_of_an_old_incarnation_of_a_worker_are_lost(nats_url: str, fleet: str) -> None:
    """A frame of a new incarnation, even before its presence, shows that requests of the old one are lost."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        lost = tasks.create_task(rb.complete(request(2)))
        first = await worker.next_key()
        await worker.frame(0, chunk(first, 0, 7), admitted=(first,))
        other = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        worker.incarnation = "life-2"
        await worker.frame(0, chunk(key, 0, 5, total=1), admitted=(key,))
        second = await worker.next_key()
        await worker.frame(1, chunk(second, 0, 8, total=1), admitted=(second,))
        generation = await lost

    assert list(other.result().token_ids) == [5]
    assert list(generation.token_ids) == [7, 8]


async def test_requests_on_an_earlier_link_of_a_worker_are_lost(nats_url: str, fleet: str) -> None:
    """If a worker opens a new link, the requests on its old link are lost."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(2)))
        first = await worker.next_key()
        await worker.frame(0, chunk(first, 0, 7), admitted=(first,))
        worker.link = 1
        await worker.frame(0)
        taken = await worker.take()
        await worker.frame(0, chunk(taken.key, 0, 8, total=1), admitted=(taken.key,))

    assert taken.key.attempt == 1
    assert taken.queued.lane == "resume"
    assert list(taken.request.prompt_token_ids) == [1, 2, 7]
    assert taken.request.sampling.max_tokens == 1
    assert list(completing.result().token_ids) == [7, 8]


async def test_a_stopped_presence_of_any_incarnation_ends_the_requests_of_a_worker(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The presence `stopped` immediately ends all requests of the worker, under any incarnation."""
    monkeypatch.setattr("rollbus.bus.client.runtime.UNHEARD_S", 1000.0)
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(1)))
        first = await worker.next_key()
        await worker.frame(0, admitted=(first,))
        await worker.acked(1)
        worker.incarnation = "life-2"
        await worker.announce(WorkerState.STOPPED)
        await worker.announce()
        second = await worker.next_key()
        await worker.frame(0, chunk(second, 0, 8, total=1), admitted=(second,))

    assert list(completing.result().token_ids) == [8]


async def test_an_offer_that_is_handled_after_its_worker_stopped_is_lost(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt of an offer that is handled after its worker has stopped is lost.

    Another incarnation continues the request from the received token.
    """
    monkeypatch.setattr("rollbus.bus.client.runtime.UNHEARD_S", 0.5)
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(2)))
        first = await worker.next_key()
        await worker.announce(WorkerState.STOPPED)
        await until_true(lambda: not rb.fleet.workers)
        await worker.frame(0, chunk(first, 0, 7), admitted=(first,))
        await worker.acked(1)
        worker.incarnation = "life-2"
        await worker.announce()
        second = await worker.next_key()
        await worker.frame(0, chunk(second, 0, 8, total=1), admitted=(second,))

    assert list(completing.result().token_ids) == [7, 8]


async def test_a_fenced_presence_ends_the_requests_of_its_incarnation(nats_url: str, fleet: str) -> None:
    """The presence `fenced` ends the requests of this incarnation. Requests that are only in the queue stay there."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        running, queued = tasks.create_task(rb.complete(request(1))), tasks.create_task(rb.complete(request(1)))
        first, untouched = await worker.next_key(), await worker.next_key()
        await worker.frame(0, admitted=(first,))
        await worker.acked(1)
        await worker.announce(WorkerState.FENCED)
        worker.incarnation = "life-2"
        await worker.announce()
        second = await worker.next_key()
        await worker.frame(
            0, chunk(second, 0, 8, total=1), chunk(untouched, 0, 9, total=1), admitted=(second, untouched)
        )

    assert (second.request_id, second.attempt) == (first.request_id, 1)
    by_id = {task.result().request_id: task.result() for task in (running, queued)}
    assert by_id[second.request_id].attempts == 2
    assert by_id[untouched.request_id].attempts == 1


@pytest.mark.proves("P51")
async def test_only_one_worker_serves_an_attempt(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a second worker sends chunks of another worker's attempt, the client ignores them and sends an abort."""
    told: list[tuple[str, RequestKey]] = []
    monkeypatch.setattr(ClientLinks, "abort", lambda _, worker, key: told.append((worker, key)))
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        chunks = [chunk(key, 0, 666), chunk(key, 1, 666, total=2)]
        frame = Frame(WIRE_VERSION, "x", 0, [key], chunks, 0, worker.client_incarnation)
        await publish(worker.nats, worker.subjects.frame("me", "impostor"), encode(frame))
        await worker.frame(1, chunk(key, 1, 8, total=2))
        generation = await completing
        late = rb.stats().late_chunks

    assert list(generation.token_ids) == [7, 8]
    assert generation.worker_ids == ("hand",)
    assert late == 2
    # One abort answers the offer, and one answers the chunk that is not terminal.
    assert told == [("impostor", key)] * 2


async def test_of_two_workers_with_one_id_only_one_serves_an_attempt(nats_url: str, fleet: str) -> None:
    """If two live workers have one id, the client ignores chunks of the other worker's attempt."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        for incarnation in ("life-2", "life-1"):
            worker.incarnation = incarnation
            await worker.announce()
        await rb.fleet.state()
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        worker.incarnation = "life-2"
        await worker.frame(0, chunk(key, 1, 666, total=2), admitted=(key,))
        worker.incarnation = "life-1"
        await worker.frame(1, chunk(key, 1, 8, total=2))
        generation = await completing
        late = rb.stats().late_chunks

    assert list(generation.token_ids) == [7, 8]
    assert (generation.attempts, late) == (1, 1)


async def test_aborts_of_thousands_of_requests_fit_into_messages(nats_url: str, fleet: str) -> None:
    """If a client abandons many requests with long ids at once, it aborts each of them in messages of limited size."""
    requests = [request(request_id=f"{'x' * 100}{i}") for i in range(600)]
    async with hand_worker(nats_url, fleet) as (worker, rb):
        results = rb.complete_many(requests, max_in_flight=600)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(anext(results))
            keys = [await worker.next_key() for _ in requests]
            await worker.frame(0, chunk(keys[0], 0, 5, total=1), admitted=tuple(keys))
        await results.aclose()
        first = await worker.aborted()
        aborted = [*first, *await worker.aborted(599 - len(first))]

    assert sorted(aborted) == sorted(keys[1:])
    assert len(first) <= 256


async def test_an_error_of_the_worker_is_followed_by_another_attempt(nats_url: str, fleet: str) -> None:
    """An error that concerns only the worker does not reach the caller. The next attempt of the request follows."""
    names = ("WORKER_STOPPED", "WORKER_FENCED", "CLIENT_LOST", "OVER_BUDGET", "ENGINE_DEAD")
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        for number, name in enumerate(names):
            completing = tasks.create_task(rb.complete(request(2)))
            first = await worker.next_key()
            lost = failure(first, 1, ErrorCode[name], total=1)
            await worker.frame(2 * number, chunk(first, 0, 7), lost, admitted=(first,))
            second = await worker.next_key()
            await worker.frame(2 * number + 1, chunk(second, 0, 8, total=1), admitted=(second,))
            generation = await completing
            assert (list(generation.token_ids), generation.attempts) == ([7, 8], 2)
        assert rb.stats().attempts_lost == len(names)


async def test_an_error_of_the_request_reaches_its_caller(nats_url: str, fleet: str) -> None:
    """An error that concerns the request itself reaches its caller, also if the worker sends it without an offer."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        many = tasks.create_task(all_of(rb.complete_many([request(request_id="a"), request(request_id="b")])))
        keys = {key.request_id: key for key in (await worker.next_key(), await worker.next_key())}
        await worker.frame(0, failure(keys["a"], 0, ErrorCode.UNSUPPORTED))
        await worker.frame(1, chunk(keys["b"], 0, 7), failure(keys["b"], 1, ErrorCode.ENGINE_ERROR, total=1))
        by_id = {generation.request_id: generation for generation in await many}

    assert (by_id["a"].error.code, by_id["a"].worker_ids) == (ErrorCode.UNSUPPORTED, ())
    assert (by_id["b"].error.code, by_id["b"].worker_ids) == (ErrorCode.ENGINE_ERROR, ("hand",))
    assert list(by_id["b"].token_ids) == [7]


@pytest.mark.proves("P13")
async def test_wrong_totals_of_a_worker_fail_the_request(nats_url: str, fleet: str) -> None:
    """If the totals of a worker are wrong, the request fails with `protocol_error`, and the client aborts it there."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(error_of(rb.complete(request()), RequestFailed))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7, 8, total=3), admitted=(key,))
        assert (await failing).code is ErrorCode.PROTOCOL_ERROR
        assert await worker.aborted() == [key]


@pytest.mark.proves("P35")
async def test_frames_of_an_earlier_request_with_the_same_id_are_late(nats_url: str, fleet: str) -> None:
    """A request that uses an id again has another key, so frames of the earlier request are late."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rb.complete(request(1, request_id="same")))
        old = await worker.next_key()
        await worker.frame(0, chunk(old, 0, 1, total=1), admitted=(old,))
        await first
        second = tasks.create_task(rb.complete(request(1, request_id="same")))
        new = await worker.next_key()
        await worker.frame(1, chunk(old, 0, 666, total=1), admitted=(old,))
        await worker.frame(2, chunk(new, 0, 2, total=1), admitted=(new,))

    assert old != new
    assert list(second.result().token_ids) == [2]
    assert second.result().attempts == 1


async def test_all_child_requests_end_if_a_child_request_fails(nats_url: str, fleet: str) -> None:
    """If one of three child requests fails, the call fails once, and the client aborts the other child requests."""
    sampling = SamplingParams(max_tokens=5, n=3, logprobs=None)
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        call = rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=sampling))
        failing = tasks.create_task(error_of(call, RequestFailed))
        keys = [await worker.next_key() for _ in range(3)]
        await worker.frame(0, admitted=tuple(keys))
        await worker.frame(1, failure(keys[1], 0, ErrorCode.ENGINE_ERROR))
        assert (await failing).code is ErrorCode.ENGINE_ERROR
        assert sorted(await worker.aborted(2)) == sorted([keys[0], keys[2]])
