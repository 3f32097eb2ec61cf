"""New requests wait for a worker that comes, and fail at once if none does."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

import rollbus
from rollbus.bus.client import config
from rollbus.bus.client import presence as watching
from rollbus.bus.client.config import BOUNDS_S, DurationsByModel
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import connected, publish
from rollbus.bus.nats.server import Server
from rollbus.bus.protocol.fleet.presence import FleetSnapshot
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import BusBroken, ErrorCode, InvalidRequest, NoWorkers, RequestTimeout
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import presence, synthetic_worker
from tests.support.hand_worker import chunk, failure, hand_worker, request
from tests.support.requests import greedy
from tests.support.waits import SOON_S, busy_timeout, until_true

COUNT = 50
Announce = Callable[..., Awaitable[None]]


@contextlib.asynccontextmanager
async def announcing(nats_url: str, fleet: str) -> AsyncIterator[Announce]:
    """Yield a function that publishes presence of the worker `w`, which starts, as its supervisor does."""
    async with connected(nats_url, name="supervisor") as nats:

        async def announce(**fields: object) -> None:
            starting = {"state": WorkerState.STARTING, "start_left_s": 60.0, "lease_s": 60.0, "model": "synthetic"}
            said = presence(**{**starting, "uptime_s": 0.0, **fields})
            await publish(nats, Subjects(fleet).presence("w"), encode_json(said))
            await nats.flush()

        yield announce


async def is_known(rb: rollbus.Client) -> None:
    """Wait until the client has received the presence of a worker."""
    await until_true(lambda: rb.fleet.workers)


@pytest.mark.proves("P45")
async def test_new_requests_wait_for_a_worker_that_starts(nats_url: str, fleet: str) -> None:
    """Requests for a model with a starting worker wait, although it has no queue yet, and all of them end whole."""
    async with (
        announcing(nats_url, fleet) as announce,
        rollbus.connect(nats_url, fleet=fleet, worker_grace_s=0) as rb,
        busy_timeout(SOON_S),
        asyncio.TaskGroup() as tasks,
    ):
        await announce(incarnation="1")
        await is_known(rb)
        waiting = [tasks.create_task(rb.complete(greedy(i, 5))) for i in range(COUNT)]
        # Several rounds in which a request could fail.
        _, pending = await asyncio.wait(waiting, timeout=1.5)
        assert len(pending) == COUNT
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            generations = [await task for task in waiting]

    assert [len(generation.token_ids) for generation in generations] == [5] * COUNT


async def test_a_forged_start_holds_no_request_beyond_its_deadline(nats_url: str, fleet: str) -> None:
    """A worker that starts for ever holds requests until their deadline. The error names worker, start and cause."""
    async with announcing(nats_url, fleet) as announce, rollbus.connect(nats_url, fleet=fleet) as rb:
        for life in ("1", "2"):
            await announce(incarnation=life, start_left_s=1e300, last_error="restart 3 of 5 in 8 s")
        await until_true(lambda: [worker.incarnation for worker in rb.fleet.workers] == ["2"])
        with pytest.raises(RequestTimeout) as caught:
            await rb.complete(greedy(1, 5, timeout_s=0.8))

    assert caught.value.message == (
        "the request was not finished within 0.8 s: no worker serves synthetic "
        "(w is starting, start 2 since it served: restart 3 of 5 in 8 s)"
    )


async def test_requests_fail_with_the_last_cause_when_the_supervisor_has_given_up(nats_url: str, fleet: str) -> None:
    """When the supervisor starts the worker no more, waiting and new requests fail at once with the cause."""
    async with (
        announcing(nats_url, fleet) as announce,
        rollbus.connect(nats_url, fleet=fleet, worker_grace_s=3600) as rb,
        busy_timeout(SOON_S),
        asyncio.TaskGroup() as tasks,
    ):
        await provision(Server(nats_url), fleet, ["synthetic"])
        await announce()
        await is_known(rb)
        waiting = [tasks.create_task(_failing(rb)) for _ in range(3)]
        await asyncio.wait(waiting, timeout=0.2)
        await announce(state=WorkerState.FAILED, start_left_s=0.0, last_error="ended with exit code 1")
        errors = [await task for task in waiting]
        late = await _failing(rb)

    cause = "(w is not started again: ended with exit code 1)"
    assert {str(error.message) for error in errors} == {f"no worker serves synthetic, and none starts {cause}"}
    assert late.message == f"no live worker serves synthetic {cause}"


async def test_a_start_counts_only_for_its_time(nats_url: str, fleet: str) -> None:
    """A worker that has not served within its start time is no reason to wait."""
    async with announcing(nats_url, fleet) as announce, rollbus.connect(nats_url, fleet=fleet) as rb:
        await announce(start_left_s=0.0)
        await is_known(rb)
        with pytest.raises(NoWorkers, match="w is starting"):
            await rb.complete(greedy(1, 5, model="synthetic"))


async def test_with_the_option_requests_wait_for_workers_that_nobody_announces(nats_url: str, fleet: str) -> None:
    """With `wait_for_workers_s`, requests wait for the first worker, with and without a model's name.

    A name that nobody knows beside other models still fails at once.
    """
    options = {"worker_grace_s": 0.0, "wait_for_workers_s": 600.0}
    async with (
        rollbus.connect(nats_url, fleet=fleet, **options) as rb,  # type: ignore[arg-type]
        busy_timeout(SOON_S),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = [tasks.create_task(rb.complete(greedy(1, 5, model=name))) for name in (None, "synthetic")]
        _, pending = await asyncio.wait(waiting, timeout=1.5)
        assert len(pending) == 2
        async with synthetic_worker(nats_url, fleet):
            for task in waiting:
                assert len((await task).token_ids) == 5
            with pytest.raises(InvalidRequest, match="model is 'other'"):
                await rb.complete(greedy(1, 5, model="other"))


async def test_the_option_ends_with_no_workers(nats_url: str, fleet: str) -> None:
    """After `wait_for_workers_s` without a worker, a request fails with `NoWorkers`."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, worker_grace_s=0, wait_for_workers_s=1.0) as rb,
        busy_timeout(SOON_S),
    ):
        for name in (None, "m"):
            with pytest.raises(NoWorkers):
                await rb.complete(greedy(1, 5, model=name))


async def test_requests_share_the_error_of_a_slow_read(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the recorded models cannot be read, requests fail together, and do not wait for one read each."""
    reads: list[None] = []

    async def fails(_store: DesiredStore) -> None:
        reads.append(None)
        await asyncio.sleep(0.2)
        raise BusBroken("no answer")

    monkeypatch.setattr(DesiredStore, "models", fails)
    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(_failing(rb))
    assert len(reads) <= 2


async def _failing(rb: rollbus.Client) -> NoWorkers:
    with pytest.raises(NoWorkers) as caught:
        await rb.complete(greedy(1, 5, model="synthetic"))
    return caught.value


# How long requests wait for a worker's offer, as their client measures it.


def test_a_bucket_includes_its_upper_bound() -> None:
    """A bucket includes its upper bound, as in Prometheus. The last bucket has all values above the highest bound."""
    waits = DurationsByModel()
    for seconds in (BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        waits.add("m", seconds)
    found = waits.copy()["m"]

    assert [at for at, count in enumerate(found.counts) for _ in range(count)] == [
        0,
        1,
        len(BOUNDS_S) - 1,
        len(BOUNDS_S),
    ]
    assert found.cumulative()[:2] == [(BOUNDS_S[0], 1), (BOUNDS_S[1], 2)]
    assert found.cumulative()[-2:] == [(BOUNDS_S[-1], 3), (math.inf, 4)]
    assert found.total_s == pytest.approx(BOUNDS_S[0] * 2.01 + BOUNDS_S[-1] * 2 + 1)


def test_the_number_of_counted_models_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the maximum number of models, the model that was counted first is removed. A copy does not change."""
    monkeypatch.setattr(config, "MAX_MODELS", 2)
    waits = DurationsByModel()
    for model in "abc":
        waits.add(model, 1.0)
    found = waits.copy()
    waits.add("b", 1.0)

    assert {model: sum(each.counts) for model, each in found.items()} == {"b": 1, "c": 1}
    assert sum(waits.copy()["b"].counts) == 2


def test_the_number_of_models_with_earlier_pauses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that pauses under one name of its model after another makes the client remember only the last ones."""
    monkeypatch.setattr(watching, "MAX_MODELS", 2)
    watcher: Any = SimpleNamespace()
    pauses = watching.PauseWarnings(watcher, watcher, watcher)
    for model in "abcd":
        watcher.snapshot = FleetSnapshot((presence(model=model, state=WorkerState.PAUSED),))
        pauses.update_paused()
    assert sorted(pauses.paused_s()) == ["b", "c", "d"]


async def test_each_attempt_with_an_offer_counts_its_wait_once(nats_url: str, fleet: str) -> None:
    """Each attempt counts its wait from publication to offer.

    A request without an offer does not count, and each republished attempt counts again.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        refused = tasks.create_task(rb.complete_many([request(1)]).__anext__())
        key = await worker.next_key()
        await worker.frame(0, failure(key, 0, ErrorCode.UNSUPPORTED))
        assert (await refused).error is not None
        before = rb.stats().queue_waits
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(1, chunk(key, 0, 7), admitted=(key,))
        await worker.acked(2)
        once = rb.stats().queue_waits["m"]
        await worker.announce(WorkerState.STOPPED)
        await worker.announce()
        key = await worker.next_key()
        await worker.frame(2, chunk(key, 0, 8, total=1), admitted=(key,))
        await completing
        twice = rb.stats().queue_waits["m"]

    assert before == {}
    assert (sum(once.counts), sum(twice.counts)) == (1, 2)
    assert 0 < once.total_s < twice.total_s


@pytest.fixture
def long_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new client wait for ever for workers that might still answer, and for the server's list of them."""
    monkeypatch.setattr("rollbus.bus.nats.connection.LIST_S", SOON_S)
    monkeypatch.setattr(watching, "FIRST_WAIT_S", math.inf)


async def test_a_new_client_waits_for_the_answer_of_each_connected_worker(
    long_first_wait: None, nats_url: str, fleet: str
) -> None:
    """A new client knows the fleet when all workers that are connected to the server have answered."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="a"),
        synthetic_worker(nats_url, fleet, worker_id="b"),
        rollbus.connect(nats_url, fleet=fleet) as first,
    ):
        await first.fleet.wait_for_workers(2)
        for _ in range(10):
            async with busy_timeout(SOON_S), rollbus.connect(nats_url, fleet=fleet) as rb:
                state = await rb.fleet.state()
            assert [worker.worker for worker in state.workers] == ["a", "b"]


async def test_a_new_client_waits_longer_beside_other_programs(
    long_first_wait: None, nats_url: str, fleet: str
) -> None:
    """If a program without a known name answers pings, a new client waits until all had time to answer."""
    async with (
        hand_worker(nats_url, fleet),
        synthetic_worker(nats_url, fleet),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await rb.fleet.state()
