"""The lease of an open transfer of weights: who may continue it, and when it ends without its owner. No I/O.

The owner is a client of the bus, or a user of the HTTP service on whichever service. The lease ends if no command
arrives for the idle limit, or if a client of the bus is silent for `OWNER_LOST_S`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ....schemas.control import AnyCommand, FinishWeightUpdate
from ....schemas.errors import ControlCode, ControlError
from ....schemas.presence import WorkerPresence
from ....schemas.weights import OpenTransfer

__all__ = [
    "ENDED",
    "OWNER_LOST_S",
    "TransferLease",
    "check_any_can_finish",
    "check_continues",
    "check_finish",
]

OWNER_LOST_S: Final = 20.0
"""Seconds without presence after which the owner counts as lost: several leases, since its engines then load weights
again."""
ENDED: Final = frozenset({ControlCode.NOT_FOUND, ControlCode.TRANSFER_EXPIRED, ControlCode.TRANSFER_EMPTY})
"""Errors of a finish on a worker that has not received the weights. It waits for the next update."""


@dataclass(slots=True)
class TransferLease:
    """The lease of one open transfer. All times are monotonic.

    Attributes:
        id: id of the transfer.
        by: its owner.
        heard_at: time of the owner's last presence; None: no presence was received, as of a plain NATS program.
        is_busy: True while the engine executes a command of the transfer.
    """

    id: str
    by: str
    started_at: float
    last_command_at: float
    heard_at: float | None = None
    chunks: int = 0
    is_busy: bool = False

    def note_presence(self, heard_at: float | None) -> None:
        """Handle the time of the owner's last presence; None: there is none now."""
        if heard_at is not None:
            self.heard_at = max(heard_at, self.heard_at or heard_at)

    def loss(self, now: float) -> str | None:
        """Return the text that the owner is lost, or None. This ends also a command in progress."""
        if self.heard_at is None or now - self.heard_at <= OWNER_LOST_S:
            return None
        return f"its owner, the client {self.by}, published no presence for {OWNER_LOST_S:g} s"

    def end(self, now: float, idle_s: float) -> str | None:
        """Return the reason why the lease has ended, or None."""
        if (loss := self.loss(now)) is not None:
            return loss
        if self.is_busy or now - self.last_command_at <= idle_s:
            return None
        return f"its owner, {self.by}, sent no command for {idle_s:g} s"

    def describe(self, now: float, idle_s: float) -> OpenTransfer:
        """Return the transfer as presence announces it."""
        left_s = 0.0 if self.is_busy else max(self.last_command_at + idle_s - now, 0.0)
        return OpenTransfer(
            id=self.id,
            by=self.by,
            age_s=round(max(now - self.started_at, 0.0), 3),
            left_s=round(left_s, 3),
            chunks=self.chunks,
        )


def check_continues(found: OpenTransfer | None, transfer: str | None, by: str | None) -> None:
    """Check that a command may continue the open transfer of a worker.

    Args:
        found: the open transfer; None: there is none.
        transfer: id that the command names; None: it names none.
        by: owner who sends it; None: not compared.

    Raises:
        ControlError: `transfer_expired`, `transfer_held`.
    """
    if found is None:
        problem = "no transfer of weights is open" if transfer is None else f"the transfer {transfer} is not open"
        raise ControlError(ControlCode.TRANSFER_EXPIRED, f"{problem}: start it again")
    if by not in {None, found.by}:
        raise ControlError(ControlCode.TRANSFER_HELD, f"another owner, not {by}, has {found}; a cancel ends it")
    if transfer not in {None, found.id}:
        raise ControlError(ControlCode.TRANSFER_EXPIRED, f"the transfer {transfer} is not open, but {found}")


def check_finish(found: OpenTransfer | None, command: FinishWeightUpdate, by: str | None) -> None:
    """Check that a finish may use what a worker has received.

    Raises:
        ControlError: `transfer_expired`, `transfer_held`, `transfer_empty`.
    """
    check_continues(found, command.transfer, by)
    if found is not None and not found.chunks:
        raise ControlError(ControlCode.TRANSFER_EMPTY, f"{found} cannot be finished: send the weights, or cancel it")


def check_any_can_finish(workers: Iterable[WorkerPresence], command: AnyCommand, by: str) -> None:
    """Check that at least one of these workers can apply a finish, before the finish is recorded.

    Raises:
        ControlError: as in `check_finish`, if every worker would reject it. Nothing has changed then.
    """
    if not isinstance(command, FinishWeightUpdate):
        return
    refusal: ControlError | None = None
    for worker in workers:
        if worker.capabilities is None or not worker.capabilities.transfer_leases:
            return  # a worker of an earlier release does not announce its transfer
        if worker.transfer is None and worker.weight_version == command.version:
            return  # the finish may be repeated
        try:
            check_finish(worker.transfer, command, by)
        except ControlError as error:
            if refusal is None or refusal.code is ControlCode.TRANSFER_EXPIRED:
                refusal = error
        else:
            return
    if refusal is not None:
        raise ControlError(refusal.code, f"nothing was changed: {refusal.message}")
