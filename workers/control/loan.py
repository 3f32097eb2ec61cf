"""The loan of one worker: until when it sleeps, and when it may wake.

The worker counts the term by its own clock. At its end, or at a recorded wake, it wakes only if no other process uses
the memory that its engine needs. Otherwise it sleeps on and tries again each minute.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from ...bus.logs import warning_of
from ...bus.protocol.fleet.loans import is_loan
from ...schemas.control import LOAD_TIMEOUT_S, Recorded, Sleep, Wake
from ...schemas.errors import BusBroken, ControlCode, ControlError
from ...schemas.limits import MAX_ERROR_CHARS
from ..engines.engine import EngineRunner
from .desired import PAUSE, SLEEP, DesiredReader, HandledRegister, RegisterOutcome, failure, repeat
from .registers import Registers
from .staging import command_boundary

logger = logging.getLogger(__name__)

WAKE_RETRY_S: Final = 60.0
"""Seconds after which a lent worker that must wake, but whose memory is in use, tries again."""
MEMORY_S: Final = 10.0
"""Maximum seconds to read the memory of the GPUs. A driver that does not answer must not delay other commands."""
FLUSH: Final = "flush"
"""Name of the register for the prefix cache."""


class LoanTerm:
    """The term of the last loan of one worker. The caller passes in the time of its own monotonic clock."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._ends_at = 0.0

    def begin(self, recorded: Recorded, now: float, elapsed_s: float | None = None) -> None:
        """Begin the term of a loan that was not seen before. The same loan after an undo continues its term.

        Args:
            elapsed_s: seconds since the recording, after a restart of the worker. What is left is at most the term.
        """
        if elapsed_s is not None or recorded.command.id != self._id:
            self._id = recorded.command.id
            self._ends_at = now + min(max(recorded.for_s - (elapsed_s or 0.0), 0.0), recorded.for_s)

    def left_s(self, recorded: Recorded | None, now: float) -> float:
        """Return the seconds until the recorded loan ends; 0: it is over, or the worker is not lent by the record."""
        return 0.0 if recorded is None or recorded.command.id != self._id else max(self._ends_at - now, 0.0)


class Loan:
    """Decides when a lent worker must wake, and when it may.

    Args:
        handled: the handled registers of the reconciler.
        runner: has the engine, which may not have started.
    """

    def __init__(
        self, reader: DesiredReader, registers: Registers, handled: dict[str, HandledRegister], runner: EngineRunner
    ) -> None:
        self._reader = reader
        self._registers = registers
        self._handled = handled
        self._runner = runner
        self._term = LoanTerm()
        # Id of the loan whose term has ended, and the time from which this worker may try to wake again.
        self._ended: str | None = None
        self._wake_at = 0.0
        self._is_waking = False
        self.problem: str | None = None
        """Reason why this worker could not wake, or None."""

    @property
    def recorded(self) -> Recorded | None:
        """The recorded command that lends this worker, or None."""
        recorded = self._reader.effective.get(SLEEP)
        return recorded if is_loan(recorded) else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the loan ends; 0: none is recorded any more, but the worker sleeps. None: it is not lent."""
        return self._term.left_s(self.recorded, time.monotonic()) if self._registers.is_lent else None

    @property
    def effective(self) -> Mapping[str, Recorded]:
        """The recorded commands. A loan whose term has ended counts as a wake."""
        recorded = self.recorded
        if recorded is None or recorded.command.id != self._ended:
            return self._reader.effective
        wake = Wake(id=recorded.command.id, model=recorded.command.model, timeout_s=LOAD_TIMEOUT_S)
        return {**self._reader.effective, SLEEP: replace(recorded, command=wake)}

    @property
    def must_wake(self) -> bool:
        """True if no recorded command lets this worker sleep any more."""
        recorded = self.effective.get(SLEEP)
        return recorded is None or not isinstance(recorded.command, Sleep)

    def postpones(self, register: str) -> bool:
        """Return True if a lent worker applies `register` later: it needs the engine, or would stage weights."""
        return self._registers.is_lent and register not in (PAUSE, FLUSH) and (register != SLEEP or self.must_wake)

    async def continue_term(self) -> None:
        """Count the term from the recording, by the clock of the server if it still knows the time."""
        if (recorded := self.recorded) is None:
            return
        at = recorded.at
        with warning_of(BusBroken, logger, "loan.time_read_failed error=%s"):
            stored_at = await self._reader.store.recorded_at(self._reader.model, recorded.epoch)
            at = at if stored_at is None else stored_at.timestamp()
        self._term.begin(recorded, time.monotonic(), time.time() - at if at else 0.0)

    def watch(self) -> bool:
        """Begin the term of a new loan, or end it. Return True if there may be something to apply."""
        recorded, now = self.recorded, time.monotonic()
        if recorded is not None:
            self._term.begin(recorded, now)
            if not self._term.left_s(recorded, now) and self._ended != recorded.command.id:
                logger.info("loan.ended id=%s", recorded.command.id)
                self._ended = recorded.command.id
                repeat(self._handled, SLEEP)
                return True
        return self._registers.is_lent and self.must_wake and now >= self._wake_at

    async def try_wake(self) -> bool:
        """If this worker must wake and its memory is free, let the registers wake it. Return True if it is not free."""
        recorded, handled = self.effective.get(SLEEP), self._handled.get(SLEEP)
        is_new = recorded is not None and (handled is None or handled.epoch != recorded.epoch)
        if not self._registers.is_lent or not self.must_wake or not (is_new or time.monotonic() >= self._wake_at):
            return False
        try:
            with command_boundary("wake"):
                async with asyncio.timeout(MEMORY_S):
                    user = await self._runner.engine.find_memory_user()
        except (ControlError, TimeoutError) as exc:
            user = f"the use of its memory is unknown: {str(exc) or 'the driver does not answer'}"
        if user is None:
            self._registers.is_lent, self._is_waking, self.problem = False, True, None
            # Weights that could not be loaded without the memory are tried again too.
            for register in [SLEEP, *(name for name, each in self._handled.items() if not each.outcome.is_applied)]:
                repeat(self._handled, register)
            return False
        self._postpone(f"loan over, {user}")
        if recorded is not None:
            error = ControlError(ControlCode.NOT_SERVING, f"{self.problem}; this worker sleeps on")
            self._handled[SLEEP] = HandledRegister(recorded.epoch, failure(error))
        return True

    def note(self, recorded: Recorded, outcome: RegisterOutcome) -> None:
        """Note the outcome of the recorded sleep or wake."""
        if isinstance(recorded.command, Sleep):
            if outcome.is_applied:
                self._registers.is_lent, self.problem = self._registers.is_lent or is_loan(recorded), None
        elif self._is_waking and self._registers.is_deep and outcome.error is not None:
            self._registers.is_lent = True
            self._postpone(outcome.error.message)
        self._is_waking = False

    def _postpone(self, problem: str) -> None:
        self._wake_at, self.problem = time.monotonic() + WAKE_RETRY_S, problem[:MAX_ERROR_CHARS]
        logger.warning("loan.wake_postponed reason=%s", self.problem)
