"""Commands in the middle of which the server goes away, or a worker stands still or dies: what was recorded comes true.

Who gave the command hears the truth, and no result shows anything of it.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus import FleetState, Generation
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.control import Ack
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic import SyntheticConfig
from tests.control.support import MODEL, start, write_checkpoint
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_state, until_worker, worker_of
from tests.support.invariants import check_results, observing
from tests.support.load import VOCAB_SIZE
from tests.support.nats_server import require_binary
from tests.support.outcomes import incomplete
from tests.support.requests import greedy
from tests.support.waits import until
from tests.support.worker_process import LASTING

pytestmark = pytest.mark.slow

LEASE = ("--lease-s", "2")
ENGINE_ARGS: dict[str, Any] = {"step_s": 0.003, "max_num_seqs": 8, "vocab_size": VOCAB_SIZE}
SLOW_LOADS: dict[str, Any] = {**ENGINE_ARGS, "faults": {"load_s": 1.0}}
"""What happens to a worker that loads weights happens before it has them."""
REQUESTS = [greedy(prompt, 100 + 40 * prompt, request_id=f"r{prompt}") for prompt in range(20)]
"""More than both workers run at once, of many lengths: when the first ends, both have others for a second and more."""


async def go_away(server: EmbeddedServer) -> None:
    """Be away for 3 s."""
    await server.kill()
    # The length of the outage is what this is about.
    await asyncio.sleep(3)
    await server.restart()


async def results_of(rb: rollbus.Client, has_begun: asyncio.Event) -> list[Generation]:
    """Run all requests; tells when the first has ended, so that others are in flight."""
    results = []
    async for generation in rb.complete_many(REQUESTS):
        results.append(generation)
        has_begun.set()
    return results


class Stage:
    """Waits for worker `a` to say that it has come to a stage of a command; None: that it was heard."""

    def __init__(self, stage: str | None) -> None:
        self._stage = stage
        self._loop = asyncio.get_running_loop()
        self._is_reached = asyncio.Event()

    def take(self, ack: Ack) -> None:
        """Take an answer, on the client's own thread."""
        if (ack.worker, ack.stage) == ("a", self._stage):
            self._loop.call_soon_threadsafe(self._is_reached.set)

    async def wait(self) -> None:
        """Until then."""
        await self._is_reached.wait()


def all_in(state: WorkerState) -> Callable[[FleetState], bool]:
    """Both workers are in this state."""
    return lambda fleet: [worker.state for worker in fleet.workers] == [state] * 2


@pytest.mark.parametrize("command", ["update", "pause"])
async def test_a_server_away_in_the_middle_of_a_command(command: str, fleet: str, tmp_path: Path) -> None:
    """Both workers apply it all the same, and the ledger says so; every request is answered in full."""
    require_binary()
    one, two = (write_checkpoint(tmp_path / str(version), seed=version) for version in (1, 2))
    # With a lease that outlasts the outage on a busy machine, too.
    own: dict[str, Any] = {"model_path": str(one), "weight_version": 1, "lease_s": 30.0}
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), **own}
    config = SyntheticConfig.from_args(SLOW_LOADS if command == "update" else ENGINE_ARGS)
    async with (
        EmbeddedServer() as server,
        observing(server.url, fleet) as observer,
        synthetic_worker(server.url, fleet, config=config, worker_id="a", **fields),
        synthetic_worker(server.url, fleet, config=config, worker_id="b", **fields),
        rollbus.connect(server.url, fleet=fleet) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(2)
        has_begun = asyncio.Event()
        running = tasks.create_task(results_of(rb, has_begun))
        await has_begun.wait()
        stage = Stage("loading" if command == "update" else None)
        update, pause = rb.fleet.update_weights, rb.fleet.pause
        is_update = command == "update"
        given = update(two, version=2, on_ack=stage.take) if is_update else pause(mode="wait", on_ack=stage.take)
        doing = tasks.create_task(given)
        await stage.wait()
        await go_away(server)
        ledger = await doing
        # The observer was cut off too: it has to be back before it can hear that what was promised ends.
        await until(observer.workers, {"a", "b"})
        if command == "pause":
            state = await until_state(rb, all_in(WorkerState.PAUSED))
            assert [worker.pause_mode for worker in state.workers] == ["wait", "wait"]
            await rb.fleet.resume()
        results = await running
        # Not who owes an answer: it has not heard all.
        await until(observer.queued, {})
        await until(observer.busy_workers, {})
        assert observer.history.problems == []

    assert sorted(ledger.applied) == ["a", "b"]
    check_results(results, REQUESTS)
    assert all(np.all(np.diff(result.weight_versions) >= 0) for result in results)
    wanted = {1, 2} if command == "update" else {1}
    assert {int(version) for result in results for version in result.weight_versions} == wanted


async def test_a_worker_that_stood_still_in_an_update(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """It is missing in the ledger, the other is what the ledger says; when it goes on, it comes to the new weights."""
    one, two = (write_checkpoint(tmp_path / "roots" / str(version), seed=version) for version in (1, 2))
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        start(nats_url, fleet, "a", one, *LEASE, **SLOW_LOADS) as a,
        start(nats_url, fleet, "b", one, *LASTING, **SLOW_LOADS),
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(2)
        life = worker_of(await rb.fleet.state(), "a").incarnation
        has_begun = asyncio.Event()
        running = tasks.create_task(results_of(rb, has_begun))
        await has_begun.wait()
        stage = Stage("loading")
        doing = tasks.create_task(incomplete(rb.fleet.update_weights(two, version=2, on_ack=stage.take)))
        await stage.wait()
        a.send_signal(signal.SIGSTOP)
        ledger = (await doing).ledger
        await until_worker(rb, "b", lambda worker: worker.weight_version == 2)
        a.send_signal(signal.SIGCONT)
        await until_worker(rb, "a", lambda worker: worker.incarnation != life)
        state = await until_state(rb, all_in(WorkerState.SERVING))
        results = await running
        await observer.check_at_rest()

    assert (sorted(ledger.applied), sorted(ledger.missing)) == (["b"], ["a"])
    assert worker_of(state, "a").incarnation != life
    assert [worker.weight_version for worker in state.workers] == [2, 2]
    assert state.desired[MODEL].registers["weights"].epoch == ledger.epochs[MODEL]
    check_results(results, REQUESTS)
    assert all(np.all(np.diff(result.weight_versions) >= 0) for result in results)


async def test_a_worker_killed_in_a_waiting_pause(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """It is missing; the other is paused, and so is the killed one when it is back; the resume leads to all answers."""
    one = write_checkpoint(tmp_path / "roots" / "1", seed=1)
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        start(nats_url, fleet, "a", one, *LEASE, **ENGINE_ARGS) as a,
        start(nats_url, fleet, "b", one, *LASTING, **ENGINE_ARGS),
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(2)
        has_begun = asyncio.Event()
        running = tasks.create_task(results_of(rb, has_begun))
        await has_begun.wait()
        stage = Stage(None)
        doing = tasks.create_task(incomplete(rb.fleet.pause(mode="wait", on_ack=stage.take)))
        await stage.wait()
        a.kill()
        ledger = (await doing).ledger
        async with start(nats_url, fleet, "a", one, *LEASE, **ENGINE_ARGS):
            await until_state(rb, all_in(WorkerState.PAUSED))
            assert not running.done()
            await rb.fleet.resume()
            results = await running
            await observer.check_at_rest()

    assert (sorted(ledger.applied), sorted(ledger.missing)) == (["b"], ["a"])
    check_results(results, REQUESTS)
