"""Decides which workers must ack a command."""

from collections.abc import Collection, Sequence
from typing import Final

from ....schemas.control import (
    AnyCommand,
    FinishWeightUpdate,
    InitWeightTransfer,
    LoadLora,
    StartWeightUpdate,
    UnloadLora,
    UpdateWeightChunk,
    UpdateWeights,
)
from ....schemas.errors import InvalidRequest, NoWorkers
from ....schemas.presence import WorkerPresence, WorkerState
from .fleet_snapshot import list_names

__all__ = ["Roster", "needs_known_models", "workers_that_must_ack"]

Roster = dict[str, tuple[WorkerPresence, ...]]
"""The workers that must ack, by model and in the order of their ids. Each model has at least one worker."""

_SILENT: Final = frozenset({WorkerState.STARTING, WorkerState.FENCED, WorkerState.STOPPED, WorkerState.FAILED})
"""A worker in these states sends no ack. When it comes back, it reads the recorded commands."""
_OF_ONE_MODEL: Final = (
    UpdateWeights,
    LoadLora,
    UnloadLora,
    InitWeightTransfer,
    StartWeightUpdate,
    UpdateWeightChunk,
    FinishWeightUpdate,
)
"""Commands that apply to one model only."""


def needs_known_models(command: AnyCommand) -> bool:
    """Return True if the command applies to one model and names neither the model nor workers.

    The only model with live workers need not be the model that the caller means.
    """
    return isinstance(command, _OF_ONE_MODEL) and command.model is None and command.workers is None


def workers_that_must_ack(
    workers: Sequence[WorkerPresence], command: AnyCommand, known_models: Collection[str] = ()
) -> Roster:
    """Return the live `workers` that must ack `command`.

    Args:
        known_models: models that count although they may have no live workers; see `needs_known_models`.

    Raises:
        NoWorkers: no live worker can ack; the message has the states of the other workers.
        InvalidRequest: a named worker cannot ack; no worker of the named model is known; the command names no model
            although it must; or a worker of the model cannot decode one of its fields.
    """
    known = [worker for worker in workers if command.model in (None, worker.model)]
    if workers and not known:
        models = ", ".join(sorted({worker.model for worker in workers}))
        raise InvalidRequest(field="model", problem=f"is {command.model!r}", allowed=f"one of {models}")
    able = [worker for worker in known if worker.state not in _SILENT]
    others = ", ".join(f"{worker.worker} is {worker.state}" for worker in known if worker.state in _SILENT)
    if not able:
        raise NoWorkers(
            message=f"no live worker of {command.model or 'any model'} can answer" + (f" ({others})" if others else "")
        )
    if command.workers is not None:
        wanted = set(command.workers)
        answering, able = able, [worker for worker in able if worker.worker in wanted]
        absent = sorted(wanted - {worker.worker for worker in able})
        if absent:
            states = {worker.worker: f"{worker.worker} ({worker.state}, {worker.model})" for worker in workers}
            of_model = "" if command.model is None else f" of {command.model}"
            live = sorted(f"{worker.worker} ({worker.model})" for worker in answering)
            raise InvalidRequest(
                field="workers",
                problem=f"names no live worker{of_model}: {', '.join(states.get(name, name) for name in absent)}",
                allowed=list_names(live),
            )
    roster: dict[str, tuple[WorkerPresence, ...]] = {}
    for worker in sorted(able, key=lambda presence: (presence.model, presence.worker)):
        roster[worker.model] = (*roster.get(worker.model, ()), worker)
    named = sorted(roster.keys() | set(known_models))
    if len(named) > 1 and isinstance(command, _OF_ONE_MODEL):
        raise InvalidRequest(field="model", problem="is missing", allowed=f"one of {list_names(named)}")
    _check_label([worker for worker in known if worker.model in roster], command)
    return roster


def _check_label(workers: Sequence[WorkerPresence], command: AnyCommand) -> None:
    """Check that every worker of the model can decode a label, also workers that the command does not name.

    The desired state is one message for the whole model. A worker that does not know a field could not decode the
    message at all. A starting worker has published no capabilities yet, and is left out.
    """
    if not isinstance(command, UpdateWeights | FinishWeightUpdate) or command.label is None:
        return
    older = sorted(
        worker.worker
        for worker in workers
        if worker.capabilities is not None and not worker.capabilities.version_labels
    )
    if older:
        raise InvalidRequest(
            field="label",
            problem=f"is {command.label!r}, which workers of an earlier release cannot decode",
            allowed=f"a number as the version, without a label, until {', '.join(older)} are upgraded",
        )
