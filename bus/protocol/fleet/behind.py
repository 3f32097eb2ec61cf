"""Which workers have not done what they were told, and what is known of why."""

from typing import Final

from ....schemas.desired import DesiredState
from ....schemas.presence import WorkerPresence, WorkerState
from .desired import target_version

__all__ = ["why_behind"]

_UNABLE: Final = frozenset(
    {
        WorkerState.STARTING,
        WorkerState.OUTDATED,
        WorkerState.POISONED,
        WorkerState.WAITING_FOR_WEIGHTS,
        WorkerState.FENCED,
        WorkerState.FAILED,
    }
)
"""States in which a worker serves nothing although no command says so."""


def why_behind(worker: WorkerPresence, state: DesiredState) -> str | None:
    """Say what keeps a worker from being as its model's desired state says, to follow its id; None: it is."""
    if worker.state in _UNABLE:
        return f"is {worker.state}" + (f": {worker.last_error}" if worker.last_error else "")
    doing = "" if worker.staging is None else f", {worker.staging.stage}"
    target = target_version(state, worker.worker)
    if target is not None and worker.weight_version != target:
        return f"has weights {worker.weight_version}, not {target}{doing}"
    if worker.epoch < state.epoch:
        return f"is at epoch {worker.epoch} of {state.epoch}{doing}"
    return None
