"""How long requests wait for a worker's offer, as their client measures it."""

import asyncio
import math

import pytest

from rollbus.bus.client import times
from rollbus.bus.client.times import BOUNDS_S, DurationsByModel
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import WorkerState
from tests.support.hand_worker import chunk, failure, hand_worker, request


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
    monkeypatch.setattr(times, "MAX_MODELS", 2)
    waits = DurationsByModel()
    for model in "abc":
        waits.add(model, 1.0)
    found = waits.copy()
    waits.add("b", 1.0)

    assert {model: sum(each.counts) for model, each in found.items()} == {"b": 1, "c": 1}
    assert sum(waits.copy()["b"].counts) == 2


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
