"""What is to be done next to be as desired, and what a worker is once all is done. Pure decisions over plain values."""

from collections.abc import Mapping
from dataclasses import dataclass

from bus.protocol.desired import WEIGHTS
from bus.protocol.states import WorkerEvent
from schemas.control import AckError, AckStatus, Canary, Drain, FinishWeightUpdate, Pause, Sleep
from schemas.desired import Recorded
from schemas.errors import ControlCode, ControlError
from schemas.limits import MAX_ERROR_CHARS

__all__ = ["PAUSE", "SLEEP", "Dealt", "Due", "Outcome", "failure", "next_due", "standing"]

PAUSE = "pause"
"""The register that says whether requests are taken."""
SLEEP = "sleep"
"""The register that says whether the engine keeps its memory."""


_STATUSES = {ControlCode.UNSUPPORTED: AckStatus.UNSUPPORTED, ControlCode.STALE: AckStatus.STALE}
"""Of what is not simply a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How bringing a register went, as the final `Ack` says it."""

    status: AckStatus = AckStatus.APPLIED
    error: AckError | None = None
    canary: Canary | None = None
    frames: dict[str, int] | None = None

    @property
    def is_applied(self) -> bool:
        """It is as desired."""
        return self.status is AckStatus.APPLIED


@dataclass(frozen=True, slots=True)
class Dealt:
    """What was done about a register."""

    epoch: int
    """For which of its commands; -1: for none that still counts."""
    outcome: Outcome | None
    """None: it shows once the worker has settled."""


@dataclass(frozen=True, slots=True)
class Due:
    """A register that is to be brought to what is desired."""

    register: str
    recorded: Recorded | None
    """None: nothing is desired of it any more."""


def failure(error: ControlError) -> Outcome:
    """The outcome where bringing a register raised `error`."""
    status = _STATUSES.get(error.code, AckStatus.FAILED)
    return Outcome(status=status, error=AckError(code=error.code, message=error.message[:MAX_ERROR_CHARS]))


def next_due(effective: Mapping[str, Recorded], dealt: Mapping[str, Dealt]) -> Due | None:
    """The register to bring next: what is no longer desired, then in the order of epochs; None: all are dealt with.

    Args:
        effective: what counts for this worker.
        dealt: what was done about each register, well or not.
    """
    gone = sorted(register for register in dealt if register not in effective)
    if gone:
        return Due(gone[0], None)
    changed = [
        (recorded.epoch, register)
        for register, recorded in effective.items()
        if register not in dealt or dealt[register].epoch != recorded.epoch
    ]
    if not changed:
        return None
    _, register = min(changed)
    return Due(register, effective[register])


def standing(effective: Mapping[str, Recorded], dealt: Mapping[str, Dealt], *, is_poisoned: bool) -> WorkerEvent:
    """What a worker is for which nothing is due: what forbids to serve comes before what asks not to.

    Args:
        is_poisoned: its weights are not to be trusted.
    """
    if is_poisoned:
        return WorkerEvent.SPOILT
    if WEIGHTS in effective and not _is_applied(dealt, WEIGHTS):
        is_lost = isinstance(effective[WEIGHTS].command, FinishWeightUpdate)
        return WorkerEvent.STRANDED if is_lost else WorkerEvent.MISSED
    pause = effective[PAUSE].command if PAUSE in effective else None
    if isinstance(pause, Drain):
        return WorkerEvent.DRAINED
    if SLEEP in effective and isinstance(effective[SLEEP].command, Sleep) and _is_applied(dealt, SLEEP):
        return WorkerEvent.SLEPT
    return WorkerEvent.PAUSED if isinstance(pause, Pause) else WorkerEvent.CAUGHT_UP


def _is_applied(dealt: Mapping[str, Dealt], register: str) -> bool:
    outcome = dealt[register].outcome if register in dealt else None
    return outcome is not None and outcome.is_applied
