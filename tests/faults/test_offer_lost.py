"""A worker has taken a request, and its client never hears of it: the queue gives it to the next."""

import asyncio

import numpy as np
import pytest

import bus
from tests.support.fleet import synthetic_worker
from tests.support.invariants import observing
from tests.support.load import greedy
from tests.support.tcp_proxy import Direction, tcp_proxy
from workers.engines.synthetic import SyntheticConfig

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(step_s=0.001)


async def test_what_was_never_offered_goes_to_the_next_worker(nats_url: str, fleet: str) -> None:
    """The only worker pulls a request and is cut off before its offer leaves; a second one serves it from the queue."""
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        synthetic_worker(proxy.url, fleet, config=CONFIG, worker_id="a") as (a, _),
        bus.connect(nats_url, fleet=fleet) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        await rb.complete(greedy(0, 1))
        # It hears, and cannot speak: its standing pull brings it the request.
        proxy.freeze(Direction.TO_SERVER)
        completing = tasks.create_task(rb.complete(greedy(1, 50)))
        async with asyncio.timeout(10):
            while not a.presence().in_flight:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        async with synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="b"):
            generation = await completing
            alone = await rb.complete(greedy(1, 50))
            proxy.thaw()
            await rb.fleet.wait_for_workers(2)

            assert generation.worker_ids == ("b",)
            np.testing.assert_array_equal(generation.token_ids, alone.token_ids)
            await observer.check_at_rest()
