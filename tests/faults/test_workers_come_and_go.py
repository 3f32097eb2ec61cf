"""Workers join and leave in order while requests run: each gets its share, and nothing shows in the results."""

import contextlib

import pytest

import bus
from tests.support.fleet import synthetic_worker
from tests.support.invariants import observing
from tests.support.load import VOCAB_SIZE, Load
from workers.engines.synthetic import SyntheticConfig

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)


async def test_workers_join_and_leave_under_load(nats_url: str, fleet: str) -> None:
    """Three workers take turns, two at a time: all serve, those that leave hand over at once, and all is exact."""
    load = await Load.mixed(150, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        contextlib.AsyncExitStack() as a,
        contextlib.AsyncExitStack() as b,
        contextlib.AsyncExitStack() as c,
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        lives = {"a": a, "b": b, "c": c}

        async def join(name: str) -> None:
            worker = synthetic_worker(nats_url, fleet, config=CONFIG, worker_id=name)
            await lives[name].enter_async_context(worker)

        await join("a")
        await rb.fleet.wait_for_workers()
        strikes = {20: lambda: join("b"), 50: a.aclose, 70: lambda: join("c"), 100: b.aclose}
        results = await load.run(rb, strikes=strikes)

        assert {name for generation in results for name in generation.worker_ids} == {"a", "b", "c"}
        assert max(generation.attempts for generation in results) in {2, 3}
        await observer.check_at_rest()
