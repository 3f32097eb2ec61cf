"""Workers that offer to run requests and send no tokens: their requests go to other workers, and they are avoided."""

import asyncio

import pytest

import rollbus
from rollbus.bus.client import silence as silence_checks
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.attempt import silence
from rollbus.schemas.control import Pause, Resume
from rollbus.schemas.errors import RequestTimeout
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import synthetic_worker
from tests.support.hand_worker import MODEL, HandWorker, worker_by_hand
from tests.support.patience import SOON_S
from tests.support.requests import short
from tests.support.waits import until_true

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers count as silent after a second, and let them apply commands within two seconds."""
    monkeypatch.setattr(silence, "SILENT_S", 1.0)
    monkeypatch.setattr(silence_checks, "READ_S", 0.1)
    monkeypatch.setattr(silence_checks, "MAX_BEHIND_S", 2.0)


async def offer_all(worker: HandWorker) -> None:
    """Offer to run every request, and send no tokens."""
    number = 0
    while True:
        taken = await worker.take()
        await worker.frame(number, admitted=tuple(taken.keys))
        number += 1


async def test_requests_of_a_silent_worker_go_to_another_which_also_gets_the_next(
    nats_url: str, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that offers and sends nothing keeps no request: each completes at another worker.

    The client names the silent worker in its log. It refuses the offers of this worker for later requests, so they
    complete without another silence.
    """
    async with (
        asyncio.timeout(3 * SOON_S),
        worker_by_hand(nats_url, fleet) as hand,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        hand.free_slots = 1000
        await hand.announce()
        offering = tasks.create_task(offer_all(hand))
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
        offering.cancel()

    assert {result.worker_ids for result in results} == {("hand", "good")}
    assert {result.worker_ids[-1] for result in later} == {"good"}
    assert "worker.silence_detected worker=hand" in caplog.text
    assert "engine" not in caplog.text


async def test_alone_a_silent_worker_keeps_the_request_after_two_moves(nats_url: str, fleet: str) -> None:
    """If no other worker serves, the request returns to the silent worker twice, and then stays until its deadline."""
    async with (
        asyncio.timeout(3 * SOON_S),
        worker_by_hand(nats_url, fleet) as hand,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        hand.free_slots = 1000
        await hand.announce()
        offering = tasks.create_task(offer_all(hand))
        with pytest.raises(RequestTimeout):
            await rb.complete(short("r", model=MODEL, timeout_s=8))
        assert rb.stats().attempts_lost == 2
        offering.cancel()


async def test_a_pause_that_is_not_recorded_does_not_excuse_a_silent_worker(nats_url: str, fleet: str) -> None:
    """A worker that only says that it is paused counts as silent. A worker whose pause is recorded does not."""
    async with (
        asyncio.timeout(3 * SOON_S),
        worker_by_hand(nats_url, fleet) as hand,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        hand.free_slots = 1000
        await hand.announce()
        offering = tasks.create_task(offer_all(hand))
        call = tasks.create_task(rb.complete(short("r", model=MODEL, timeout_s=60)))
        await hand.acked(1)
        await DesiredStore(hand.nats, hand.subjects).record(MODEL, Pause(model=MODEL))
        await hand.announce(WorkerState.PAUSED)
        for _ in range(hand.presences.qsize() + 3):  # three seconds of the client's presence
            await hand.presences.get()
        assert rb.stats().attempts_lost == 0
        await DesiredStore(hand.nats, hand.subjects).record(MODEL, Resume(model=MODEL))
        await until_true(lambda: rb.stats().attempts_lost)
        offering.cancel()
        call.cancel()
