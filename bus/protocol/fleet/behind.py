"""Finds the workers that do not match the desired state, and the known reasons."""

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
"""States in which a worker serves nothing although no command requires this."""


def why_behind(worker: WorkerPresence, state: DesiredState) -> str | None:
    """Return why a worker does not match the desired state of its model, phrased to follow its id; None: it matches."""
    if worker.state in _UNABLE:
        return f"is {worker.state}" + (f": {worker.last_error}" if worker.last_error else "")
    doing = "" if worker.staging is None else f", {worker.staging.stage}"
    target = target_version(state, worker.worker)
    if target is not None and worker.weight_version != target:
        return f"has weights {worker.weight_version}, not {target}{doing}"
    if worker.epoch < state.epoch:
        return f"is at epoch {worker.epoch} of {state.epoch}{doing}"
    return None
