"""Recorded commands take effect, even if the server is away during the command, or a worker freezes or dies.

The controller gets the true command result, and the results of requests show no effect.
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
from rollbus.schemas.acks import Ack
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.control.support import MODEL, start, write_checkpoint
from tests.support.fleet import synthetic_worker, until_state, until_worker, worker_of
from tests.support.invariants import check_results, observing
from tests.support.nats_server import require_binary
from tests.support.processes import LASTING
from tests.support.requests import greedy, incomplete
from tests.support.waits import until

pytestmark = pytest.mark.slow

LEASE = ("--lease-s", "2")
ENGINE_ARGS: dict[str, Any] = {"step_s": 0.01, "max_num_seqs": 8, "vocab_size": VOCAB_SIZE}
SLOW_LOADS: dict[str, Any] = {**ENGINE_ARGS, "faults": {"load_s": 1.0}}
"""Loads are slow, so that faults affect a worker before it has loaded the weights."""
REQUESTS = [greedy(prompt, 30 + 12 * prompt, request_id=f"r{prompt}") for prompt in range(20)]
"""More requests than both workers run at once, of many lengths.

When the first ends, both workers have other requests for at least a second.
"""


async def go_away(server: EmbeddedServer) -> None:
    """Stop the server for 3 s."""
    await server.kill()
    # The test is about an outage of this length.
    await asyncio.sleep(3)
    await server.restart()


async def results_of(rb: rollbus.Client, has_begun: asyncio.Event) -> list[Generation]:
    """Run all requests, and set the event when the first has ended, so that other requests are in flight."""
    results = []
    async for generation in rb.complete_many(REQUESTS):
        results.append(generation)
        has_begun.set()
    return results


class Stage:
    """Waits until worker `a` reports a stage of a command.

    The stage None means that the worker received the command.
    """

    def __init__(self, stage: str | None) -> None:
        self._stage = stage
        self._loop = asyncio.get_running_loop()
        self._is_reached = asyncio.Event()

    def take(self, ack: Ack) -> None:
        """Handle an ack on the client's own thread."""
        if (ack.worker, ack.stage) == ("a", self._stage):
            self._loop.call_soon_threadsafe(self._is_reached.set)

    async def wait(self) -> None:
        """Wait for the stage."""
        await self._is_reached.wait()


def both_workers_in(state: WorkerState) -> Callable[[FleetState], bool]:
    """Return a function that is True if both workers are in this state."""
    return lambda fleet: [worker.state for worker in fleet.workers] == [state] * 2


@pytest.mark.parametrize("command", ["update", "pause"])
async def test_all_workers_apply_a_command_during_which_the_server_is_away(
    command: str, fleet: str, tmp_path: Path
) -> None:
    """If the server is away during a command, both workers still apply it, and every request completes.

    The command result lists both workers as applied.
    """
    require_binary()
    one, two = (write_checkpoint(tmp_path / str(version), seed=version) for version in (1, 2))
    # The lease outlasts the outage, also on a busy machine.
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
        # The observer was disconnected too. It must be connected again before it can observe the end of all promises.
        await until(observer.workers, {"a", "b"})
        if command == "pause":
            state = await until_state(rb, both_workers_in(WorkerState.PAUSED))
            assert [worker.pause_mode for worker in state.workers] == ["wait", "wait"]
            await rb.fleet.resume()
        results = await running
        # Do not check for missing acks, because the observer has not received all of them.
        await until(observer.queued, {})
        await until(observer.busy_workers, {})
        assert observer.history.problems == []

    assert sorted(ledger.applied) == ["a", "b"]
    check_results(results, REQUESTS)
    assert all(np.all(np.diff(result.weight_versions) >= 0) for result in results)
    wanted = {1, 2} if command == "update" else {1}
    assert {int(version) for result in results for version in result.weight_versions} == wanted


async def test_a_worker_frozen_during_an_update_loads_the_new_weights_later(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker that is frozen during an update is missing in the command result.

    When it continues, it loads the new weights.
    """
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
        state = await until_state(rb, both_workers_in(WorkerState.SERVING))
        results = await running
        await observer.check_at_rest()

    assert (sorted(ledger.applied), sorted(ledger.missing)) == (["b"], ["a"])
    assert worker_of(state, "a").incarnation != life
    assert [worker.weight_version for worker in state.workers] == [2, 2]
    assert state.desired[MODEL].registers["weights"].epoch == ledger.epochs[MODEL]
    check_results(results, REQUESTS)
    assert all(np.all(np.diff(result.weight_versions) >= 0) for result in results)


async def test_a_worker_killed_during_a_waiting_pause_is_paused_after_its_restart(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker that is killed during a waiting pause is missing in the result.

    After its restart it is paused too, and after the resume all requests complete.
    """
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
            await until_state(rb, both_workers_in(WorkerState.PAUSED))
            assert not running.done()
            await rb.fleet.resume()
            results = await running
            await observer.check_at_rest()

    assert (sorted(ledger.applied), sorted(ledger.missing)) == (["b"], ["a"])
    check_results(results, REQUESTS)
