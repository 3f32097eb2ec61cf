"""Compares workers and new versions with the desired state, and presence with what was recorded or acked."""

from collections.abc import Iterable, Mapping
from typing import Final

from ....schemas.acks import Ack
from ....schemas.control import LoadLora, UpdateWeights
from ....schemas.desired import DesiredState
from ....schemas.errors import ControlCode, ControlError
from ....schemas.presence import WorkerPresence, WorkerState
from .desired import effective, served_version, target_version

__all__ = ["check_started", "shows_ack", "stale_workers", "why_behind"]

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
_BEFORE_READ: Final = frozenset({WorkerState.STARTING, WorkerState.FENCED, WorkerState.STOPPED, WorkerState.FAILED})
"""States of workers that serve nothing. Before they serve, they apply what is recorded."""


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


def stale_workers(workers: Iterable[WorkerPresence], states: Mapping[str, DesiredState]) -> tuple[str, ...]:
    """Return the ids of the workers whose presence does not show yet that they handled their recorded commands."""
    return tuple(
        worker.worker
        for worker in workers
        if worker.state not in _BEFORE_READ
        and worker.model in states
        and any(recorded.epoch > worker.epoch for recorded in effective(states[worker.model], worker.worker).values())
    )


def shows_ack(presence: WorkerPresence | None, ack: Ack) -> bool:
    """Return True if a worker's presence is as new as its ack of a recorded command, or its incarnation has ended."""
    return presence is None or presence.incarnation != ack.incarnation or presence.epoch >= (ack.epoch or 0)


def check_started(state: DesiredState, workers: tuple[WorkerPresence, ...], command: UpdateWeights | LoadLora) -> None:
    """Check that a version is newer than the version of workers for which nothing is recorded.

    Raises:
        ControlError: `old_version`.
    """
    started = {worker.weight_version for worker in workers if served_version(state, worker.worker) is None}
    if started and (command.version < max(started) or started == {command.version}):
        problem = f"version {command.version} is not newer than {max(started)}, which workers were started with"
        remedy = "" if isinstance(command, LoadLora) else "; set allow_rollback to load it anyway"
        raise ControlError(ControlCode.OLD_VERSION, f"{problem}{remedy}")
