"""The state of a fleet at one moment."""

import logging

import msgspec

from ...schemas.desired import DesiredState
from ...schemas.errors import BusBroken
from ...schemas.presence import WorkerPresence
from ..protocol.fleet.behind import stale_workers
from ..protocol.html import as_html
from ..queue.streams import QueueDepth
from .runtime import ClientRuntime

__all__ = ["FleetState", "read_fleet_state"]

logger = logging.getLogger(__name__)


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    fleet: str
    """Name of the fleet."""
    workers: tuple[WorkerPresence, ...]
    """Live workers, sorted by id. Empty if there are none."""
    queues: tuple[QueueDepth, ...] = ()
    """Waiting requests by model and lane. Empty if the server has no queue for the workers' models."""
    queue_problems: dict[str, str] = {}
    """Why a queue does not answer, by model. For example, a queue without a leader delivers no requests."""
    desired: dict[str, DesiredState] = {}
    """Desired state of the workers by model. Models without a recorded command are left out."""

    def __repr__(self) -> str:
        """Return one line with each worker and its state, and the number of waiting requests."""
        workers = ", ".join(f"{worker.worker} {worker.state}" for worker in self.workers) or "no workers"
        return f"<FleetState {self.fleet}: {workers}; {self._num_waiting} requests wait>"

    def _repr_html_(self) -> str:
        rows = [(w.worker, w.model, w.state, w.weight_version, w.in_flight) for w in self.workers]
        columns = ("worker", "model", "state", "weights", "in flight")
        return as_html(f"Fleet {self.fleet}: {self._num_waiting} requests wait", rows, columns)

    @property
    def _num_waiting(self) -> int:
        return sum(queue.waiting for queue in self.queues)

    @property
    def stale(self) -> tuple[str, ...]:
        """Ids of the workers whose presence does not show yet that they handled their commands in `desired`."""
        return stale_workers(self.workers, self.desired)


async def read_fleet_state(runtime: ClientRuntime, settle_s: float) -> FleetState:
    """Ask all workers for their state, and wait up to `settle_s` more seconds for stale workers. See `Fleet.state`.

    Raises:
        BusBroken: the connection to NATS is gone.
    """
    watcher = runtime.watcher
    workers, queues, problems = await watcher.workers_and_queues()
    try:
        desired = await runtime.controller.store.read_all()
    except BusBroken as exc:
        # The presence of the workers is valid without the desired states.
        logger.warning("fleet.desired_states_read_failed error=%s", exc)
        desired = {}
    if stale_workers(workers, desired):
        await watcher.wait_until(lambda: not stale_workers(watcher.table.workers(), desired), settle_s)
        workers = watcher.table.workers()
    return FleetState(
        fleet=watcher.subjects.fleet,
        workers=runtime.silence.named(workers),
        queues=queues,
        queue_problems=problems,
        desired=desired,
    )
