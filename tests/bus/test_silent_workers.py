"""Workers that offer to run requests and send no tokens: their requests go to other workers, and they are avoided."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

import rollbus
from rollbus.bus.client import links as silence_checks
from rollbus.bus.client import presence as presence_watch
from rollbus.bus.client.client import runtime_of
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.attempt import suspects
from rollbus.schemas.control import Pause, Resume
from rollbus.schemas.errors import RequestTimeout
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.schemas.weights import OpenTransfer
from tests.support.fleet import presence, synthetic_worker
from tests.support.hand_worker import MODEL, HandWorker, worker_by_hand
from tests.support.requests import short
from tests.support.waits import SOON_S, until_true


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers count as silent after a second, and let them apply commands within two seconds."""
    monkeypatch.setattr(suspects, "SILENT_S", 1.0)
    monkeypatch.setattr(silence_checks, "STATE_READ_S", 0.1)
    monkeypatch.setattr(silence_checks, "MAX_BEHIND_S", 2.0)


async def offer_all(worker: HandWorker) -> None:
    """Offer to run every request, and send no tokens."""
    number = 0
    while True:
        taken = await worker.take()
        await worker.frame(number, admitted=tuple(taken.keys))
        number += 1


@contextlib.asynccontextmanager
async def silent_worker(
    nats_url: str, fleet: str, *, weight_version: int = 0, offers: bool = True
) -> AsyncIterator[tuple[HandWorker, rollbus.Client, asyncio.TaskGroup]]:
    """Yield a worker that offers to run all requests and sends no tokens, a client, and a group for tasks."""
    async with (
        asyncio.timeout(3 * SOON_S),
        worker_by_hand(nats_url, fleet) as hand,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        hand.free_slots, hand.weight_version = 1000, weight_version
        await hand.announce()
        offering = tasks.create_task(offer_all(hand)) if offers else None
        yield hand, rb, tasks
        if offering is not None:
            offering.cancel()


async def test_requests_of_a_silent_worker_go_to_another_which_also_gets_the_next(
    nats_url: str, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that offers and sends nothing keeps no request: each completes at another worker.

    The client names the silent worker in its log. It refuses the offers of this worker for later requests, so they
    complete without another silence.
    """
    async with silent_worker(nats_url, fleet) as (hand, rb, tasks):
        calls = [tasks.create_task(rb.complete(short(f"r{number}", model=MODEL))) for number in range(6)]
        await hand.acked(1)
        async with synthetic_worker(nats_url, fleet, model=MODEL, worker_id="good"):
            results = [await call for call in calls]
            lost = rb.stats().attempts_lost
            later = [await rb.complete(short(f"later{number}", model=MODEL)) for number in range(6)]
            assert rb.stats().attempts_lost == lost
            errors = {worker.worker: worker.last_error for worker in (await rb.fleet.state()).workers}
            assert errors["good"] is None
            assert "sent no tokens" in str(errors["hand"])

    assert {result.worker_ids for result in results} == {("hand", "good")}
    assert {result.worker_ids[-1] for result in later} == {"good"}
    assert "worker.silence_detected worker=hand" in caplog.text
    assert "engine" not in caplog.text


async def test_offers_without_tokens_are_no_sign_of_life(nats_url: str, fleet: str) -> None:
    """A worker that offers to run the same request again and again is silent. A follower may wait there longer."""
    async with silent_worker(nats_url, fleet, offers=False) as (hand, rb, tasks):
        call = tasks.create_task(rb.complete(short("r", model=MODEL, timeout_s=60)))
        key = await hand.next_key()
        await hand.frame(0, admitted=(key,))
        await hand.acked(1)
        (child,) = runtime_of(rb).coordinator.open_children(lambda _: True)
        child.may_wait = True
        await hand.presences.get()
        for _ in range(hand.presences.qsize() + 3):  # three seconds
            await hand.presences.get()
        assert rb.stats().attempts_lost == 0

        number = 1
        while not rb.stats().attempts_lost:
            await hand.frame(number, admitted=(key,))
            await hand.presences.get()  # a second
            number += 1
            assert number < 6
        call.cancel()


async def test_a_request_goes_directly_only_to_a_worker_that_can_run_it(nats_url: str, fleet: str) -> None:
    """A request that no other worker can run goes to the queue again, not directly to a worker with older weights."""
    async with (
        synthetic_worker(nats_url, fleet, model=MODEL, worker_id="old"),
        silent_worker(nats_url, fleet, weight_version=1) as (_, rb, _tasks),
    ):
        with pytest.raises(RequestTimeout):
            await rb.complete(short("r", model=MODEL, timeout_s=8, min_weight_version=1))
        assert rb.stats().direct <= 1  # to the silent worker, before it was silent


async def test_models_that_a_worker_had_are_forgotten(nats_url: str, fleet: str) -> None:
    """A worker that does not serve and changes its model often leaves nothing in the client's memory."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        checks = runtime_of(rb).silence

        async def read(model: str) -> None:
            checks._watcher.table.update(presence(model=model, state=WorkerState.PAUSED), time.monotonic())
            await checks._suspended({"w"})

        for model in ("a", "b"):
            await runtime_of(rb).thread.run(read(model))
        assert set(checks._states) == {"b"}


async def test_a_pause_that_is_not_recorded_does_not_excuse_a_silent_worker(nats_url: str, fleet: str) -> None:
    """A worker that only says that it is paused counts as silent. A worker whose pause is recorded does not."""
    async with silent_worker(nats_url, fleet) as (hand, rb, tasks):
        call = tasks.create_task(rb.complete(short("r", model=MODEL, timeout_s=60)))
        await hand.acked(1)
        await DesiredStore(hand.nats, hand.subjects).record(MODEL, Pause(model=MODEL))
        await hand.announce(WorkerState.PAUSED)
        for _ in range(hand.presences.qsize() + 3):  # three seconds of the client's presence
            await hand.presences.get()
        assert rb.stats().attempts_lost == 0
        await DesiredStore(hand.nats, hand.subjects).record(MODEL, Resume(model=MODEL))
        await until_true(lambda: rb.stats().attempts_lost)
        call.cancel()


async def test_an_open_transfer_of_weights_excuses_a_worker_for_a_while(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that receives weights keeps its requests, but not for ever: no record says that it receives them."""
    monkeypatch.setattr(silence_checks, "MAX_BEHIND_S", SOON_S)
    transfer = OpenTransfer(id="t", by="trainer", age_s=1.0, left_s=599.0, chunks=1)
    async with silent_worker(nats_url, fleet) as (hand, rb, tasks):
        call = tasks.create_task(rb.complete(short("r", model=MODEL, timeout_s=60)))
        await hand.acked(1)
        await hand.announce(WorkerState.UPDATING, transfer=transfer)
        for _ in range(hand.presences.qsize() + 3):  # three seconds of the client's presence
            await hand.presences.get()
        assert rb.stats().attempts_lost == 0
        monkeypatch.setattr(silence_checks, "MAX_BEHIND_S", 0.0)
        await until_true(lambda: rb.stats().attempts_lost)
        call.cancel()


async def test_a_worker_that_serves_in_between_gets_no_further_time_for_a_transfer(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a transfer that no record shows runs on while the worker says that it serves, until the next record.

    Otherwise a worker could hold requests for ever by claiming one transfer after another.
    """
    transfer = OpenTransfer(id="t", by="trainer", age_s=1.0, left_s=599.0, chunks=1)
    busy = presence(model=MODEL, state=WorkerState.UPDATING, transfer=transfer)
    async with rollbus.connect(nats_url, fleet=fleet) as rb, worker_by_hand(nats_url, fleet) as hand:
        checks = runtime_of(rb).silence

        async def is_excused(one: WorkerPresence) -> bool:
            checks._watcher.table.update(one, time.monotonic())
            return one.worker in await checks._suspended({one.worker})

        assert await runtime_of(rb).thread.run(is_excused(busy))
        assert not await runtime_of(rb).thread.run(is_excused(presence(model=MODEL)))
        [(_, since)] = checks._behind_since.values()
        monkeypatch.setattr(silence_checks, "MAX_BEHIND_S", time.monotonic() - since)
        assert not await runtime_of(rb).thread.run(is_excused(busy))

        monkeypatch.setattr(silence_checks, "MAX_BEHIND_S", SOON_S)
        monkeypatch.setattr(silence_checks, "STATE_READ_S", 0.0)
        await DesiredStore(hand.nats, hand.subjects).record(MODEL, Resume(model=MODEL))
        assert await runtime_of(rb).thread.run(is_excused(busy))
        assert next(iter(checks._behind_since.values()))[1] > since


async def test_a_known_fleet_answers_at_once(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that knows all workers waits for their answers, and the whole time only for a worker that is silent."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w-0"),
        synthetic_worker(nats_url, fleet, worker_id="w-1"),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        await rb.fleet.state()
        monkeypatch.setattr(presence_watch, "KNOWN_AFTER_S", 0.0)
        monkeypatch.setattr(presence_watch, "PING_WAIT_S", 3600.0)
        async with asyncio.timeout(SOON_S):
            assert len((await rb.fleet.state()).workers) == 2
        table = runtime_of(rb).watcher.table
        table.update(presence(worker="silent"), time.monotonic())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await rb.fleet.state()
