"""Commands while requests run: acks are true, and the results of requests show only the intended effects."""

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest

import rollbus
from rollbus import CommandIncomplete, CommandResult
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.fleet import synthetic_worker
from tests.support.invariants import observing
from tests.support.requests import Load

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)


@pytest.mark.proves("P21")
async def test_pauses_and_resumes_under_load_leave_results_exact(nats_url: str, fleet: str) -> None:
    """Pauses with `keep` and `wait`, repeated and crossed by another controller's resumes, leave results exact."""
    load = await Load.mixed(100, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="a"),
        synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="b"),
        rollbus.connect(nats_url, fleet=fleet) as rb,
        rollbus.connect(nats_url, fleet=fleet) as other,
    ):
        await rb.fleet.wait_for_workers(2)
        await other.fleet.wait_for_workers(2)

        async def keep() -> None:
            await rb.fleet.pause()
            await other.fleet.pause()
            await rb.fleet.resume()

        async def wait() -> None:
            ledger = await other.fleet.pause(mode="wait")
            assert {ack.in_flight for ack in ledger.applied.values()} == {0}
            await rb.fleet.resume()

        async def cross() -> None:
            async with asyncio.TaskGroup() as tasks:
                for turn in range(4):
                    tasks.create_task(_tolerant(rb.fleet.pause(mode=("keep", "wait")[turn % 2])))
                    tasks.create_task(_tolerant(other.fleet.resume()))
            await rb.fleet.resume()

        await load.run(rb, strikes={20: keep, 50: wait, 80: cross})
        await observer.check_at_rest()

    assert observer.history.num_answered >= 2 * 6


async def _tolerant(command: Awaitable[CommandResult]) -> None:
    """Await a command that a later command may replace."""
    with contextlib.suppress(CommandIncomplete):
        await command
