"""If a worker has accepted a request and its offer never reaches the client, the queue delivers the request again."""

import asyncio
import contextlib

import pytest

import rollbus
from rollbus.bus.queue import streams
from rollbus.bus.queue.streams import QueueLimits
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.disagg import SHAPES, role_worker, until_paired
from tests.support.invariants import observing
from tests.support.load import Load
from tests.support.requests import greedy
from tests.support.tcp_proxy import Direction, tcp_proxy
from tests.support.waits import until_true

CONFIG = SyntheticConfig(step_s=0.001)


@pytest.mark.proves("P46")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_request_whose_offer_is_lost_goes_to_the_next_worker(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """If the only worker is disconnected before its offer leaves, a second worker serves the request from the queue.

    The same holds for a decode phase, with the KV of the first worker.
    """
    monkeypatch.setattr(streams, "QueueLimits", lambda: QueueLimits(ack_wait_s=2.0))
    *before, first = SHAPES[shape]
    second = f"{first}2"
    load = await Load.of([greedy(1, 50, request_id="r")], CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        contextlib.AsyncExitStack() as others,
        role_worker(proxy.url, fleet, first, CONFIG) as (cut_off, _),
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        for name in before:
            await others.enter_async_context(role_worker(nats_url, fleet, name, CONFIG))
        await until_paired(rb, *SHAPES[shape])
        await rb.complete(greedy(0, 2))
        # The worker can receive and cannot send. Its open pull delivers the request.
        proxy.freeze(Direction.TO_SERVER)
        completing = tasks.create_task(load.run(rb, legs=len(SHAPES[shape])))
        await until_true(lambda: cut_off.stats().links.requests == 2)
        async with role_worker(nats_url, fleet, second, CONFIG):
            (generation,) = await completing
            proxy.thaw()
            await until_paired(rb, first, second)

            assert (generation.attempts, generation.worker_ids) == (1, (*before, second))
            await observer.check_at_rest()
