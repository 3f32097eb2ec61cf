"""The weights with which a request may be served: at least its minimum version, and within its lag since submission."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

import rollbus
from rollbus import Generation
from rollbus.bus.nats.connection import publish
from rollbus.schemas.errors import ErrorCode, RequestError, RequestTimeout
from rollbus.schemas.limits import MAX_DELIVERIES
from rollbus.schemas.messages import encode_json
from rollbus.workers.requests import admission
from tests.control.support import write_checkpoint
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.fleet_states import until_worker
from tests.support.hand_client import hand_client
from tests.support.hand_worker import MODEL, HandWorker, chunk, failure, hand_worker, request, session_worker
from tests.support.invariants import observing
from tests.support.outcomes import error_of
from tests.support.presences import presence
from tests.support.waits import until, until_true


async def announce(worker: HandWorker, version: int, target: int | None) -> None:
    """Publish presence of a worker with this weight version and target version."""
    own: dict[str, Any] = {"worker": worker.name, "incarnation": worker.incarnation, "model": MODEL, "lease_s": 60.0}
    said = presence(weight_version=version, target_version=target, **own)
    await publish(worker.nats, worker.subjects.presence(worker.name), encode_json(said))


@pytest.mark.proves("P81")
@pytest.mark.usefixtures("unhurried")
async def test_only_workers_with_the_required_weights_serve(nats_url: str, fleet: str) -> None:
    """Of workers with versions 1 and 2, only the second serves requests for version 2, in their first attempt.

    The client sends them directly to this worker. Through the queue, about half of them would first reach the older
    worker.
    """
    async with (
        synthetic_worker(nats_url, fleet, worker_id="old", weight_version=1) as (old, _),
        synthetic_worker(nats_url, fleet, worker_id="new", weight_version=2),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        wanted = [request(request_id=f"r{i}", min_weight_version=2) for i in range(20)]
        results = [generation async for generation in rb.complete_many(wanted)]
        assert rb.stats().direct == len(wanted)

    assert old.stats().intake.too_new == 0
    assert {result.worker_ids for result in results} == {("new",)}
    assert {result.attempts for result in results} == {1}
    assert {int(version) for result in results for version in result.weight_versions} == {2}


async def test_a_request_that_waits_for_weights_is_no_poison_request(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for weights runs once a worker has them, however often the queue delivered it before."""
    monkeypatch.setattr(admission, "WEIGHTS_ARE_COMING_S", 0.01)
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, worker_id="w", weight_version=1) as (worker, _),
    ):
        await client.until_serving("w")
        worker._links.versions.target_version = 2
        await client.enqueue(request(request_id="r", min_weight_version=2))
        await until_true(lambda: worker._intake.stats.too_new > MAX_DELIVERIES)
        assert not client.chunks["r"]
        worker._links.versions.weight_version = 2
        await client.until_ended("r")

    assert client.error_of("r") is None
    assert {chunk.weight_version for chunk in client.chunks["r"]} == {2}


async def test_the_timeout_error_states_the_required_and_the_newest_version(one_worker: StartServed) -> None:
    """If no worker gets the weights in time, the error states the required version and the newest available version."""
    async with one_worker(weight_version=1) as (rb, *_):
        with pytest.raises(
            RequestTimeout, match=r"waits for a worker with weight version 2; the newest .* worker is 1"
        ) as e:
            await rb.complete(request(min_weight_version=2, timeout_s=0.3))

    assert e.value.stage == "admission"


async def test_a_timeout_with_available_weights_does_not_mention_weights(nats_url: str, fleet: str) -> None:
    """The timeout of a request whose weights are available does not mention weights."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        for fields in ({}, {"min_weight_version": 0}):
            with pytest.raises(RequestTimeout, match=r"not finished within 0\.05 s \(request"):
                await rb.complete(request(timeout_s=0.05, model="m", **fields))
            await worker.take()


@pytest.mark.proves("P81")
async def test_a_worker_rejects_a_queued_request_beyond_its_lag(nats_url: str, fleet: str) -> None:
    """A worker rejects a queued request whose target version advanced by more than its lag.

    It runs the other requests.
    """
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, worker_id="w", weight_version=5),
    ):
        await client.until_serving("w")
        await client.enqueue(request(request_id="old", max_weight_lag=1), target_version=3)
        await client.enqueue(request(request_id="fresh", max_weight_lag=2), target_version=3)
        await client.enqueue(request(request_id="resumed", max_weight_lag=0), attempt=1)
        await client.enqueue(request(request_id="unknown", max_weight_lag=1))
        await client.until_ended("old", "fresh", "resumed", "unknown")

    errors = {name: client.error_of(name) for name in ("old", "fresh", "resumed", "unknown")}
    assert errors == {
        "old": ErrorCode.TOO_STALE,
        "fresh": None,
        "resumed": None,
        "unknown": ErrorCode.INVALID_REQUEST,
    }


async def test_an_attempt_without_output_contains_the_target_version(nats_url: str, fleet: str) -> None:
    """An attempt without output contains the target version at submission. A resumed attempt contains none."""
    async with session_worker(nats_url, fleet) as (worker, rb, session), asyncio.TaskGroup() as tasks:
        await announce(worker, 6, 7)
        await until_worker(rb, worker.name, lambda one: one.target_version == 7)
        completing = tasks.create_task(
            error_of(rb.complete(request(1, session_id=session, max_weight_lag=1)), RequestError)
        )
        direct = await worker.take()
        await announce(worker, 8, 9)
        await worker.frame(0, failure(direct.key, 0, ErrorCode.QUEUE_FULL))
        queued = await worker.take()
        await worker.frame(1, failure(queued.key, 0, ErrorCode.WORKER_STOPPED), admitted=(queued.key,))
        resumed = await worker.take()
        await worker.frame(2, failure(resumed.key, 0, ErrorCode.TOO_STALE), admitted=(resumed.key,))
        error = await completing

    assert [taken.message.target_version for taken in (direct, queued, resumed)] == [7, 7, None]
    assert (error.code, error.retryable) == (ErrorCode.TOO_STALE, False)


async def test_a_request_with_a_lag_waits_until_workers_know_the_target_version(nats_url: str, fleet: str) -> None:
    """Workers that return first read their target version. Until then, a request with a lag waits."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announce(worker, 6, None)
        await rb.fleet.state()
        tasks.create_task(finished(rb.complete(request(1, max_weight_lag=1, timeout_s=5))))
        tasks.create_task(finished(rb.complete(request(1, timeout_s=5))))
        other = await worker.take()
        await announce(worker, 6, 7)
        waited = await worker.take()
        for number, taken in enumerate((other, waited)):
            await worker.frame(number, chunk(taken.key, 0, 1, total=1), admitted=(taken.key,))

    assert [taken.message.target_version for taken in (other, waited)] == [None, 7]


async def test_requests_that_wait_during_an_update_run_or_become_too_stale(
    nats_url: str, fleet: str, one_worker: StartServed, tmp_path: Path
) -> None:
    """Three requests wait during an update: one required it, one allows it, and one becomes too stale."""
    old, new = (write_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    roots = (str(tmp_path),)
    async with (
        observing(nats_url, fleet) as observer,
        one_worker(model_path=str(old), weight_roots=roots) as (rb, *_),
        asyncio.TaskGroup() as tasks,
    ):
        early = tasks.create_task(rb.complete(request(1, min_weight_version=1)))
        await rb.complete(request(1))  # until then, the worker has received the earlier request
        await rb.fleet.pause()
        patient = tasks.create_task(rb.complete(request(1, max_weight_lag=1)))
        stale = tasks.create_task(error_of(rb.complete(request(1, max_weight_lag=0)), RequestError))
        await until(lambda: waiting(rb), 3)
        await rb.fleet.update_weights(new, version=1)
        await rb.fleet.resume()
        generations = [await early, await patient]
        error = await stale
        await observer.check_at_rest()

    assert [generation.weight_versions.tolist() for generation in generations] == [[1], [1]]
    assert (error.code, "from version 0 to 1" in error.message) == (ErrorCode.TOO_STALE, True)


async def waiting(rb: rollbus.Client) -> int:
    """Return the number of requests in the queue."""
    return sum(depth.waiting + depth.in_hand for depth in (await rb.fleet.state()).queues)


async def test_a_session_request_skips_a_worker_with_older_weights(nats_url: str, fleet: str) -> None:
    """A session's worker without the required weights gets no request.

    If it rejects a request itself, the queue follows.
    """
    async with session_worker(nats_url, fleet) as (worker, rb, session), asyncio.TaskGroup() as tasks:
        await announce(worker, 6, 6)
        await rb.fleet.state()
        tasks.create_task(finished(rb.complete(request(1, session_id=session, min_weight_version=7, timeout_s=5))))
        passed = await worker.take()
        await worker.frame(0, chunk(passed.key, 0, 1, total=1), admitted=(passed.key,))
        tasks.create_task(finished(rb.complete(request(1, session_id=session, min_weight_version=6, timeout_s=5))))
        direct = await worker.take()
        await worker.frame(1, failure(direct.key, 0, ErrorCode.WEIGHTS_TOO_OLD))
        queued = await worker.take()
        await worker.frame(2, chunk(queued.key, 0, 1, total=1), admitted=(queued.key,))

    assert [taken.queued is None for taken in (passed, direct, queued)] == [False, True, False]


async def finished(awaitable: Awaitable[Generation]) -> None:
    """Wait for a request that must finish normally."""
    assert (await awaitable).finish_reason == "length"
