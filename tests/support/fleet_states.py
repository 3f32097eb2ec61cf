"""Waits for fleet states that a client sees."""

from collections.abc import Callable

import rollbus
from rollbus import FleetState
from rollbus.bus.client.client import runtime_of
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.workers.worker import Worker
from tests.support.waits import until_true


async def until_state(rb: rollbus.Client, is_met: Callable[[FleetState], object]) -> FleetState:
    """Return the first fleet state that meets the condition; the test's own time limit ends the wait."""
    while True:
        state = await rb.fleet.state()
        if is_met(state):
            return state


async def until_worker(
    rb: rollbus.Client, name: str, is_met: WorkerState | Callable[[WorkerPresence], object]
) -> WorkerPresence:
    """Return the presence of a worker that has this state or meets the condition.

    A worker that was killed or disconnected keeps its last presence until its lease expires.
    """

    def is_as_expected(worker: WorkerPresence) -> object:
        return worker.state is is_met if isinstance(is_met, WorkerState) else is_met(worker)

    state = await until_state(
        rb, lambda state: any(one.worker == name and is_as_expected(one) for one in state.workers)
    )
    return worker_of(state, name)


def worker_of(state: FleetState, name: str) -> WorkerPresence:
    """Return the presence of one worker."""
    [worker] = [worker for worker in state.workers if worker.worker == name]
    return worker


def all_serve(state: FleetState) -> bool:
    """Return True if all known workers serve."""
    return all(worker.state is WorkerState.SERVING for worker in state.workers)


async def until_known(rb: rollbus.Client, *workers: Worker) -> None:
    """Wait until the client knows that all these workers serve in their current incarnations."""

    def are_known() -> bool:
        heard = {(one.worker, one.incarnation) for one in rb.fleet.workers if one.state is WorkerState.SERVING}
        return all((one.worker, one.incarnation) in heard for one in (worker.presence() for worker in workers))

    await until_true(are_known)


def client_state(rb: rollbus.Client) -> dict[str, int]:
    """Return the counts of what a connected client holds."""
    return runtime_of(rb).debug_state()


def is_placing(rb: rollbus.Client) -> bool:
    """Return True if the client knows of a request that it placed or that follows another one."""
    state = client_state(rb)
    return bool(state["placed"] or state["followers"])
