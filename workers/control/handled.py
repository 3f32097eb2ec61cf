"""The registers that a worker has handled, with the outcomes that answer commands."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ...bus.protocol.fleet.desired import WEIGHTS
from ...schemas.acks import AckError, AckStatus
from ...schemas.control import LORA_REGISTER
from ...schemas.errors import ControlCode
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.weights import UpdateTiming
from .desire import SLEEP, HandledRegister, RegisterOutcome
from .reading import DesiredReader

__all__ = ["HandledRegisters"]

FETCH_RETRY_S: Final = 30.0
"""Seconds before a failed fetch of weights is tried again, because the store or the disk may work again."""


class HandledRegisters:
    """Registers of the desired state that were applied or failed, and registers that must be undone."""

    def __init__(self, reader: DesiredReader) -> None:
        self._reader = reader
        self.by_name: dict[str, HandledRegister] = {}
        """The handled registers by name."""
        self._missed_at = 0.0

    def __repr__(self) -> str:
        """One line with the epochs."""
        epochs = {register: handled.epoch for register, handled in self.by_name.items()}
        return f"<HandledRegisters {epochs}>"

    def epoch_of(self, register: str) -> int | None:
        """Return the epoch in which a register was recorded, or None if the register is not desired."""
        recorded = self._reader.effective.get(register)
        return None if recorded is None else recorded.epoch

    def add(self, register: str, handled: HandledRegister) -> None:
        """Add the outcome of a register."""
        self.by_name[register] = handled
        if register == WEIGHTS and not handled.outcome.is_applied:
            self._missed_at = time.monotonic()

    def outcome_of(self, register: str, epoch: int) -> RegisterOutcome | None:
        """Return the outcome of the command recorded in `epoch`, or None if it is not known yet."""
        if self.epoch_of(register) == epoch:
            handled = self.by_name.get(register)
            is_known = handled is not None and handled.epoch == epoch and handled.is_shown
            return handled.outcome if handled is not None and is_known else None
        message = f"a later command has set {register}"
        return RegisterOutcome(status=AckStatus.STALE, error=AckError(code=ControlCode.STALE, message=message))

    def repeat_all(self) -> None:
        """Make all registers due again, because an unrelated desired state has replaced the previous one."""
        self.by_name = {register: self._again(register) for register in self.by_name}

    def retry_weights(self) -> None:
        """Make weights due again after a temporary failure."""
        handled = self.by_name.get(WEIGHTS)
        error = None if handled is None else handled.outcome.error
        is_passing = error is not None and error.code is ControlCode.STORAGE
        if is_passing and time.monotonic() > self._missed_at + FETCH_RETRY_S:
            self.by_name[WEIGHTS] = self._again(WEIGHTS)

    def reload_weights(self) -> None:
        """Make the weights due again, because the engine lost them: the recorded ones, else those of the start."""
        handled = self.by_name.get(WEIGHTS)
        self.by_name[WEIGHTS] = HandledRegister(-1, RegisterOutcome() if handled is None else handled.outcome)

    def repeat_sleep(self) -> None:
        """Make sleep due again, if it was applied."""
        if SLEEP in self.by_name and self.by_name[SLEEP].outcome.is_applied:
            self.by_name[SLEEP] = HandledRegister(-1, RegisterOutcome())

    def _again(self, register: str) -> HandledRegister:
        return HandledRegister(-1, self.by_name[register].outcome)

    def show(self, timing: Callable[[], UpdateTiming | None]) -> None:
        """Show the outcomes that were not shown yet, so that their commands are answered.

        Args:
            timing: returns the timing of the weight update. Called if its outcome is shown now.
        """
        for register, handled in self.by_name.items():
            if not handled.is_shown:
                outcome = replace(handled.outcome, timing=timing()) if register == WEIGHTS else handled.outcome
                self.by_name[register] = HandledRegister(handled.epoch, outcome)

    @property
    def lora_problem(self) -> str | None:
        """Text with the adapters that differ from the desired state and the reasons, or None."""
        lines = [
            f"adapter {register.removeprefix(LORA_REGISTER)} differs from the desired state: "
            f"{handled.outcome.error.message}"
            for register, handled in sorted(self.by_name.items())
            if register.startswith(LORA_REGISTER) and handled.outcome.error is not None
        ]
        return "; ".join(lines)[:MAX_ERROR_CHARS] or None
