"""Loans: a worker sleeps for a term, so that a trainer can use its GPU. Decides who may be lent, and when a loan ends.

A loan is the recorded command `sleep` of one worker, with a term beside it. The worker counts the term by its own
clock, so the clock of the lender does not matter.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from ....schemas.control import (
    AnyCommand,
    CheckWeights,
    DesiredState,
    FinishWeightUpdate,
    InitWeightTransfer,
    LoadLora,
    Recorded,
    Sleep,
    StartWeightUpdate,
    UnloadLora,
    UpdateWeightChunk,
    UpdateWeights,
)
from ....schemas.errors import ControlCode, ControlError
from ....schemas.presence import WorkerPresence, WorkerState
from .desired import effective

LOAN_S: Final = 3600.0
"""Default term of a loan in seconds."""
LOADS: Final = (
    *(CheckWeights, UpdateWeights, LoadLora, UnloadLora),
    *(InitWeightTransfer, StartWeightUpdate, UpdateWeightChunk, FinishWeightUpdate),
)
"""Commands that lent workers do not execute. A lent worker loads what is recorded when it returns."""


def executes(worker: WorkerPresence, command: AnyCommand) -> bool:
    """Return True if the worker executes the command now: it is not lent, or the command loads nothing."""
    return worker.loan_left_s is None or not isinstance(command, LOADS)


def is_loan(recorded: Recorded | None) -> bool:
    """Return True if a recorded command lends the worker."""
    return recorded is not None and isinstance(recorded.command, Sleep) and recorded.for_s > 0


def lone_reason(worker: WorkerPresence, workers: Iterable[WorkerPresence]) -> str | None:
    """Return why no other worker can serve the requests of `worker` while it is away. None: another one can."""
    if worker.state is not WorkerState.SERVING:
        return None
    role = "both" if worker.capabilities is None else worker.capabilities.role
    helpful = {role} if role == "prefill" else {role, "both"}
    for other in workers:
        may_help = other.worker != worker.worker and other.model == worker.model and other.state is WorkerState.SERVING
        if may_help and getattr(other.capabilities, "role", role) in helpful:
            return None
    return f"no other worker serves {worker.model!r}" + ("" if role == "both" else f" in the role {role}")


def check_lend(state: DesiredState, worker: str, workers: Sequence[WorkerPresence], *, allow_none: bool) -> None:
    """Check that a worker may be lent. The caller repeats this check over each state that it is about to change.

    Args:
        workers: live workers of the model.
        allow_none: True: it may be the last worker that serves the model.

    Raises:
        ControlError: `unsupported`: the engine cannot sleep. `not_serving`: no other worker would serve the model.
    """
    mine = next((each for each in workers if each.worker == worker), None)
    if mine is None or is_loan(effective(state, worker).get("sleep")):
        return
    if mine.capabilities is not None and not mine.capabilities.sleep:
        raise ControlError(
            ControlCode.UNSUPPORTED,
            f"worker {worker} cannot be lent: its engine cannot free its memory (vLLM needs a GPU and the engine "
            "argument 'enable_sleep_mode'); allowed: a worker whose capabilities include sleep",
        )
    why = lone_reason(mine, [each for each in workers if not _is_asleep(effective(state, each.worker).get("sleep"))])
    if why is not None and not allow_none:
        raise ControlError(ControlCode.NOT_SERVING, f"worker {worker} is not lent: {why}; --allow-none lends it anyway")


def _is_asleep(recorded: Recorded | None) -> bool:
    return recorded is not None and isinstance(recorded.command, Sleep)


def check_return(state: DesiredState, worker: str, workers: Iterable[WorkerPresence]) -> None:
    """Check that a worker is lent.

    Raises:
        ControlError: `not_found`.
    """
    is_lent = any(each.worker == worker and each.loan_left_s is not None for each in workers)
    if not is_lent and not is_loan(effective(state, worker).get("sleep")):
        raise ControlError(ControlCode.NOT_FOUND, f"worker {worker} is not lent; `rollbus status` lists loans")


_BACK: Final = frozenset({WorkerState.SERVING, WorkerState.UPDATING, WorkerState.PAUSED, WorkerState.DRAINED})


def check_returned(worker: str, workers: Iterable[WorkerPresence]) -> None:
    """Check that a worker whose loan has ended serves, or would serve without a recorded pause or drain.

    Raises:
        ControlError: `not_serving`, for example because it could not load the recorded weights.
    """
    for each in workers:
        if each.worker == worker and each.state not in _BACK:
            why = each.last_error or "`rollbus status` may show the reason"
            raise ControlError(ControlCode.NOT_SERVING, f"worker {worker} is awake, but {each.state}: {why}")
