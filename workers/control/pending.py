"""The sources that pending registers wait for: they are staged beside the reconciler, which never fetches."""

import time
from collections.abc import Sequence

from ...bus.protocol.fleet.desired import WEIGHTS
from ...schemas.errors import ControlError
from ...schemas.presence import Staging
from ...schemas.weights import UpdateTiming
from .desire import PendingRegister
from .registers import Registers
from .staging import StageCost, StageKey, Stager

__all__ = ["PendingSources"]


class PendingSources:
    """What the pending registers of one worker need, and how far that is."""

    def __init__(self, registers: Registers, stager: Stager) -> None:
        self.registers = registers
        self.stager = stager
        self._needed: dict[str, tuple[StageKey, ...]] = {}
        # Epoch of the weights that were pending last, and when they were first.
        self._weights_seen = (-1, 0.0)

    def __repr__(self) -> str:
        """One line with the registers that wait."""
        return f"<PendingSources staging={sorted(self.staging)} {self.stager!r}>"

    def set_pending(self, pending: Sequence[PendingRegister]) -> None:
        """Have the sources of these registers staged, and those of no others."""
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
        """The registers that wait for their sources."""
        is_staged = self.stager.is_staged
        return frozenset(register for register, keys in self._needed.items() if not all(map(is_staged, keys)))

    def progress_of(self, register: str) -> Staging | None:
        """Return how far the staging is that a register waits for; None: it waits for none."""
        waiting = map(self.stager.progress_of, self._needed.get(register, ()))
        return next((progress for progress in waiting if progress is not None), None)

    def error_of(self, due: PendingRegister) -> ControlError | None:
        """Return why the source of a register could not be staged; None: it was, or the register needs none."""
        source = None if due.recorded is None else self.registers.source_of(due.recorded.command)
        return None if source is None else self.stager.error_of(source)

    def end_update(self) -> UpdateTiming | None:
        """Return where the time of an update went after which the engine goes on now; None: nothing was replaced."""
        weights = self.registers.weights
        cost = StageCost() if weights.source is None else self.stager.cost_of(StageKey(weights.source))
        timing = weights.clock.timing(self._weights_seen[1], cost, time.monotonic())
        if timing is not None:
            self.stager.stats.paused_s += timing.paused_s
        return timing
