"""Sources of pending registers. Only the stager fetches them, never the reconciler."""

import time
from collections.abc import Sequence

from ...bus.protocol.fleet.desired import WEIGHTS
from ...schemas.errors import ControlError
from ...schemas.weights import Staging, UpdateTiming
from .desire import PendingRegister
from .registers import Registers
from .staging import StageCost, StageKey, Stager

__all__ = ["PendingSources"]


class PendingSources:
    """The sources that the pending registers of one worker need, with their progress."""

    def __init__(self, registers: Registers, stager: Stager) -> None:
        self.registers = registers
        self.stager = stager
        self._needed: dict[str, tuple[StageKey, ...]] = {}
        # Epoch of the last pending weights, and the time at which they were first seen.
        self._weights_seen = (-1, 0.0)

    def __repr__(self) -> str:
        """One line with the registers that wait."""
        return f"<PendingSources staging={sorted(self.staging)} {self.stager!r}>"

    def set_pending(self, pending: Sequence[PendingRegister]) -> None:
        """Stage the sources of these registers, and stop the staging for other registers."""
        self._needed = {}
        for due in pending:
            self._needed[due.register] = self.registers.needed_for(
                None if due.recorded is None else due.recorded.command
            )
            if due.register == WEIGHTS and due.recorded is not None and due.recorded.epoch != self._weights_seen[0]:
                self._weights_seen = due.recorded.epoch, time.monotonic()
        self.stager.set_desired([key for keys in self._needed.values() for key in keys])

    @property
    def staging(self) -> frozenset[str]:
        """Registers that wait for their sources."""
        is_staged = self.stager.is_staged
        return frozenset(register for register, keys in self._needed.items() if not all(map(is_staged, keys)))

    def progress_of(self, register: str) -> Staging | None:
        """Return the progress of the staging that a register waits for, or None if it waits for no staging."""
        waiting = map(self.stager.progress_of, self._needed.get(register, ()))
        return next((progress for progress in waiting if progress is not None), None)

    def error_of(self, due: PendingRegister) -> ControlError | None:
        """Return the error of a failed staging. Return None if the source is staged or the register needs no source."""
        source = None if due.recorded is None else self.registers.source_of(due.recorded.command)
        return None if source is None else self.stager.error_of(source)

    def end_update(self) -> UpdateTiming | None:
        """Return the timing of an update that ends now, when the engine resumes. None if no weights were replaced."""
        weights = self.registers.weights
        cost = StageCost() if weights.source is None else self.stager.cost_of(StageKey(weights.source))
        timing = weights.clock.timing(self._weights_seen[1], cost, time.monotonic())
        if timing is not None:
            self.stager.stats.paused_s += timing.paused_s
        return timing
