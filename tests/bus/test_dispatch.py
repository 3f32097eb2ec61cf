"""How requests reach a worker: through the queue, again after a loss, and directly to the worker of their session."""

import asyncio
from collections.abc import Awaitable

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import rollbus
from rollbus import BusBroken, Generation, NoWorkers, RequestRejected
from rollbus.bus.protocol.queue.placement import rendezvous
from rollbus.bus.queue.streams import StoredRange, set_limits, stored_in, stream_name
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.limits import MAX_ATTEMPTS
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.request import Lane
from tests.support.fleet import client_state
from tests.support.hand_worker import (
    HandWorker,
    Taken,
    chunk,
    failure,
    hand_worker,
    request,
    session_worker,
    worker_by_hand,
)
from tests.support.requests import all_of, error_of
from tests.support.waits import SOON_S, until_true


async def answer(worker: HandWorker, number: int, taken: Taken, token: int = 7) -> None:
    """Accept a request for one token and end it, in one frame."""
    await worker.frame(number, chunk(taken.key, 0, token, total=1), admitted=(taken.key,))


def jetstream(worker: HandWorker) -> JetStreamContext:
    """Return a JetStream context that changes the queue without the knowledge of client and workers."""
    return worker.nats.jetstream()


@pytest.mark.proves("P43")
async def test_a_request_beyond_the_queue_limit_fails_with_queue_full(nats_url: str, fleet: str) -> None:
    """Beyond the limit of the queue, a request fails immediately with `queue_full`.

    Requests in the queue are served.
    """
    async with (
        worker_by_hand(nats_url, fleet, pulls=False) as idle,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await set_limits(idle.nats, idle.subjects, "m", {"max_msgs": 2})
        await rb.fleet.wait_for_workers()
        waiting = [tasks.create_task(rb.complete(request(1))) for _ in range(2)]
        async with asyncio.timeout(SOON_S):
            while [depth.waiting for depth in (await rb.fleet.state()).queues if depth.lane == "normal"] != [2]:
                pass
        refused = await error_of(rb.complete(request(1)), RequestRejected)
        async with worker_by_hand(nats_url, fleet, "other") as worker:
            worker.client_incarnation = idle.client_incarnation
            for number in range(2):
                await answer(worker, number, await worker.take())
            for task in waiting:
                assert (await task).worker_ids == ("other",)

    assert refused.code is ErrorCode.QUEUE_FULL
    assert refused.retryable


@pytest.mark.proves("P48")
async def test_requests_of_a_purged_queue_are_published_again(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client searches for requests that wait for long, and publishes orphans of a purged stream again.

    It searches by lane, so a long queue needs no more server calls than a short one. A lane that cannot be read hides
    no orphan of another lane.
    """
    count = 40
    asked: list[Lane] = []

    async def stored(nats: Client, subjects: Subjects, model: str, lane: Lane) -> StoredRange:
        asked.append(lane)
        if lane == "high":
            raise BusBroken("no answer")
        return await stored_in(nats, subjects, model, lane)

    monkeypatch.setattr("rollbus.bus.client.dispatch.stored_in", stored)
    monkeypatch.setattr("rollbus.bus.client.dispatch.ORPHAN_AGE_S", 0.2)
    async with (
        worker_by_hand(nats_url, fleet, pulls=False) as idle,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        unread, *waiting = [tasks.create_task(rb.complete(request(1, priority=-(not i)))) for i in range(count + 1)]
        name = stream_name(idle.subjects, "m", "normal")
        while (await jetstream(idle).stream_info(name)).state.messages <= count:
            pass
        asked.clear()
        await jetstream(idle).purge_stream(name)
        async with worker_by_hand(nats_url, fleet, "other") as worker, asyncio.timeout(SOON_S):
            await until_true(lambda: rb.stats().orphans == count)
            assert 0 < asked.count("normal") < 20
            taken = [await worker.take() for _ in range(count)]
            worker.client_incarnation = idle.client_incarnation
            for number, each in enumerate(taken):
                await answer(worker, number, each)
            generations = [await task for task in waiting]
        unread.cancel()

    assert {each.key.attempt for each in taken} == {1}
    assert {each.queued.lane for each in taken if each.queued} == {"resume"}
    assert {generation.attempts for generation in generations} == {2}


async def test_a_request_that_waits_in_the_queue_is_no_orphan(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that stays in the queue is no orphan, however long it waits, and is published once."""
    monkeypatch.setattr("rollbus.bus.client.dispatch.ORPHAN_AGE_S", 0.0)
    async with (
        worker_by_hand(nats_url, fleet, pulls=False) as idle,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        waiting = tasks.create_task(rb.complete(request(1)))
        # Each call takes longer than one search for orphans.
        await rb.fleet.state()
        await rb.fleet.state()
        await rb.fleet.state()
        async with worker_by_hand(nats_url, fleet, "other") as worker:
            worker.client_incarnation = idle.client_incarnation
            await answer(worker, 0, await worker.take())
            assert (await waiting).attempts == 1
        assert (rb.stats().orphans, rb.stats().requests) == (0, 1)


@pytest.mark.proves("P45")
async def test_queued_requests_without_workers_fail_after_the_grace_time(nats_url: str, fleet: str) -> None:
    """After the last worker is gone, queued requests fail with `no_workers`.

    A request that the worker had accepted fails with the loss of its worker.
    """
    async with (
        worker_by_hand(nats_url, fleet) as worker,
        rollbus.connect(nats_url, fleet=fleet, client="me", worker_grace_s=0.2) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        requests = [request(request_id="queued"), request(request_id="running")]
        many = tasks.create_task(all_of(rb.complete_many(requests)))
        keys = {key.request_id: key for key in (await worker.next_key(), await worker.next_key())}
        await worker.frame(0, chunk(keys["running"], 0, 7), admitted=(keys["running"],))
        await worker.acked(1)
        await worker.announce(WorkerState.STOPPED)
        by_id = {generation.request_id: generation.error for generation in await many}

    assert isinstance(by_id["queued"], NoWorkers)
    assert by_id["running"].code is ErrorCode.WORKER_LOST


async def test_a_request_waits_until_workers_create_a_deleted_queue_again(nats_url: str, fleet: str) -> None:
    """While a worker serves the model, a request waits for a deleted stream until the workers create it again."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        for lane in ("resume", "normal"):
            await jetstream(worker).delete_stream(stream_name(worker.subjects, "m", lane))
        completing = tasks.create_task(rb.complete(request(1)))
        await answer(worker, 0, await worker.take())
        assert (await completing).attempts == 1


async def test_a_request_that_fits_no_message_is_refused(nats_url: str, fleet: str) -> None:
    """A prompt beyond the server's `max_payload` fails with the sizes, before the client publishes it."""
    prompt = rollbus.GenerateRequest(prompt_token_ids=range(3_000_000))
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        refused = await error_of(rb.complete(prompt), RequestRejected)
        completing = tasks.create_task(rb.complete(request(1)))
        await answer(worker, 0, await worker.take())
        await completing
        assert rb.stats().requests == 1

    assert refused.code is ErrorCode.TOO_LARGE
    assert "max_payload" in refused.message


async def test_a_request_fails_after_the_maximum_number_of_attempts(nats_url: str, fleet: str) -> None:
    """A request that is lost repeatedly fails after the maximum number of attempts, with the last error."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        many = tasks.create_task(all_of(rb.complete_many([request()])))
        for number in range(MAX_ATTEMPTS):
            key = await worker.next_key()
            await worker.frame(number, failure(key, 0, ErrorCode.WORKER_FENCED), admitted=(key,))
        [generation] = await many

    assert generation.error.code is ErrorCode.WORKER_FENCED
    assert generation.attempts == MAX_ATTEMPTS


async def test_a_session_moves_to_another_worker_if_its_worker_stops(nats_url: str, fleet: str) -> None:
    """If the session's worker stops, its unaccepted request goes to the queue.

    The session moves to the worker that accepts it.
    """
    names = ["gone", "other", "third"]
    session = next(f"s{i}" for i in range(100) if rendezvous(f"s{i}", names) == "gone")
    async with (
        worker_by_hand(nats_url, fleet, "gone", pulls=False) as gone,
        worker_by_hand(nats_url, fleet, "third", pulls=False),
        worker_by_hand(nats_url, fleet, "other") as other,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(3)
        first = tasks.create_task(rb.complete(request(1, session_id=session)))
        direct = await gone.take()
        await gone.announce(WorkerState.STOPPED)
        queued = await other.take()
        await answer(other, 0, queued)
        generation = await first
        second = tasks.create_task(rb.complete(request(1, session_id=session)))
        again = await other.take()
        await answer(other, 1, again)
        await second

    assert (direct.queued, again.queued) == (None, None)
    assert queued.queued is not None
    assert (generation.attempts, generation.worker_ids) == (1, ("other",))


async def test_ended_requests_leave_nothing_in_the_tables_of_the_client(nats_url: str, fleet: str) -> None:
    """After a request has ended in any way and state, the tables of the client contain nothing of it."""
    async with session_worker(nats_url, fleet) as (worker, rb, session), asyncio.TaskGroup() as tasks:
        ids = ["done", "refused", "lost", "aborted", "left", "direct"]
        sessions = {"direct": session}
        running = {
            name: tasks.create_task(outcome(rb.complete(request(request_id=name, session_id=sessions.get(name)))))
            for name in ids
        }
        keys = {key.request_id: key for key in [await worker.next_key() for _ in ids]}
        await worker.frame(0, chunk(keys["done"], 0, 1, total=1), failure(keys["refused"], 0, ErrorCode.UNSUPPORTED))
        await worker.frame(1, failure(keys["lost"], 0, ErrorCode.WORKER_STOPPED), admitted=(keys["lost"],))
        again = await worker.next_key()
        await worker.frame(2, chunk(again, 0, 1, 2, 3, total=3), admitted=(again,))
        await rb.abort(["aborted", "direct"])
        running["left"].cancel()
        await asyncio.wait(running.values())
        await until_true(lambda: not any(client_state(rb).values()))

    assert running["refused"].result() == "unsupported"
    assert {name: running[name].result() for name in ("done", "lost", "aborted", "direct")} == {
        "done": "length",
        "lost": "length",
        "aborted": "abort",
        "direct": "abort",
    }


async def outcome(awaitable: Awaitable[Generation]) -> str:
    """Return the finish reason or the error code of a request."""
    try:
        return (await awaitable).finish_reason
    except rollbus.RequestError as exc:
        return exc.code


async def test_no_attempt_is_published_when_the_only_worker_of_a_model_stops(nats_url: str, fleet: str) -> None:
    """If the only worker of a model stops, the next attempt waits for a worker and is not published."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rb.complete(request(3)))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 0), admitted=(key,))
        await worker.acked(1)
        await worker.announce(WorkerState.STOPPED)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.take(), 0.5)
        task.cancel()
