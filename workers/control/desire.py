"""Decides which register to apply next, and which state the worker must reach after that. Pure functions, no I/O."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...bus.protocol.fleet.desired import WEIGHTS
from ...bus.protocol.fleet.transfer_lease import ENDED
from ...bus.protocol.states import WorkerEvent
from ...schemas.acks import AckError, AckStatus
from ...schemas.control import Drain, FinishWeightUpdate, Pause, Sleep
from ...schemas.desired import Recorded
from ...schemas.errors import ControlCode, ControlError
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.weights import Canary, UpdateTiming, Verified

__all__ = [
    "PAUSE",
    "SLEEP",
    "HandledRegister",
    "PendingRegister",
    "RegisterOutcome",
    "failure",
    "next_due",
    "pending_registers",
    "target_event",
]

PAUSE = "pause"
"""Name of the register for pause, drain and resume."""
SLEEP = "sleep"
"""Name of the register for sleep and wake."""


_STATUSES = {ControlCode.UNSUPPORTED: AckStatus.UNSUPPORTED, ControlCode.STALE: AckStatus.STALE}
"""Ack status of each error code that does not mean `failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterOutcome:
    """The outcome of applying a register, as in the final `Ack`."""

    status: AckStatus = AckStatus.APPLIED
    error: AckError | None = None
    canary: Canary | None = None
    verified: Verified | None = None
    frames: dict[str, int] | None = None
    timing: UpdateTiming | None = None

    @property
    def is_applied(self) -> bool:
        """True if the register has its desired value."""
        return self.status is AckStatus.APPLIED


@dataclass(frozen=True, slots=True)
class HandledRegister:
    """A register that was applied, successfully or not."""

    epoch: int
    """Epoch of the applied command, or -1 to apply the register again."""
    outcome: RegisterOutcome
    is_shown: bool = True
    """False until the worker has reached its target state, if the outcome answers commands only then."""


@dataclass(frozen=True, slots=True)
class PendingRegister:
    """A register that must be applied."""

    register: str
    recorded: Recorded | None
    """The recorded command, or None if the register is no longer desired."""


def failure(error: ControlError) -> RegisterOutcome:
    """Return the outcome of a register whose application raised `error`."""
    status = _STATUSES.get(error.code, AckStatus.FAILED)
    return RegisterOutcome(status=status, error=AckError(code=error.code, message=error.message[:MAX_ERROR_CHARS]))


def pending_registers(
    effective: Mapping[str, Recorded], handled: Mapping[str, HandledRegister]
) -> list[PendingRegister]:
    """Return the registers to apply in order: first registers that are no longer desired, then the others by epoch.

    Of one epoch, the weights come first, because a transfer of weights must end before an adapter can be unloaded.
    """
    gone = sorted(register for register in handled if register not in effective)
    changed = sorted(
        (recorded.epoch, register != WEIGHTS, register)
        for register, recorded in effective.items()
        if register not in handled or handled[register].epoch != recorded.epoch
    )
    return [
        *(PendingRegister(register, None) for register in gone),
        *(PendingRegister(register, effective[register]) for _, _, register in changed),
    ]


def next_due(
    effective: Mapping[str, Recorded], handled: Mapping[str, HandledRegister], staging: Collection[str] = ()
) -> PendingRegister | None:
    """Return the first pending register that is not in `staging`, or None.

    Weights that wait for their source also delay the end of the adapter that they replace. It has the same epoch.

    Args:
        staging: registers that wait for their sources.
    """
    delayed = effective[WEIGHTS].epoch if WEIGHTS in staging and WEIGHTS in effective else None
    pending = pending_registers(effective, handled)
    return next((due for due in pending if due.register not in staging and _epoch_of(due) != delayed), None)


def _epoch_of(due: PendingRegister) -> int:
    return -1 if due.recorded is None else due.recorded.epoch


def target_event(
    effective: Mapping[str, Recorded],
    handled: Mapping[str, HandledRegister],
    *,
    is_poisoned: bool,
    has_conflict: bool = False,
    staging: Collection[str] = (),
) -> WorkerEvent | None:
    """Return the event that leads to the target state. Call this only if no register is due.

    Invalid weights take precedence over a desired pause. If the desired weights do not exist any more, that is
    the state, whether or not the present weights are invalid.

    Args:
        has_conflict: True if the source of the present weights holds other content now.

    Returns:
        The event, or None if the worker would serve but waits for the sources of the registers in `staging`.
    """
    if WEIGHTS not in staging:
        error = handled[WEIGHTS].outcome.error if WEIGHTS in handled and WEIGHTS in effective else None
        if has_conflict or (error is not None and error.code is ControlCode.OTHER_CONTENT):
            return WorkerEvent.MISSED
        is_missed = WEIGHTS in effective and not _is_applied(handled, WEIGHTS)
        is_lost = is_missed and isinstance(effective[WEIGHTS].command, FinishWeightUpdate)
        if is_poisoned and not (is_lost and _has_not_received(handled)):
            return WorkerEvent.SPOILT
        if is_missed:
            return WorkerEvent.STRANDED if is_lost else WorkerEvent.MISSED
    pause = effective[PAUSE].command if PAUSE in effective else None
    if isinstance(pause, Drain):
        return WorkerEvent.DRAINED
    if SLEEP in effective and isinstance(effective[SLEEP].command, Sleep) and _is_applied(handled, SLEEP):
        return WorkerEvent.SLEPT
    if isinstance(pause, Pause):
        return WorkerEvent.PAUSED
    return None if staging else WorkerEvent.CAUGHT_UP


def _has_not_received(handled: Mapping[str, HandledRegister]) -> bool:
    """Return True if a finish failed because this worker has not received the weights of the transfer."""
    error = handled[WEIGHTS].outcome.error if WEIGHTS in handled else None
    return error is not None and error.code in ENDED


def _is_applied(handled: Mapping[str, HandledRegister], register: str) -> bool:
    return register in handled and handled[register].outcome.is_applied
