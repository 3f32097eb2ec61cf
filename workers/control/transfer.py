"""Weights that come through the engine's own transfer engine: passed through, held up around, verified like others."""

import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from schemas.control import Canary, FinishWeightUpdate, InitWeightTransfer, StartWeightUpdate, UpdateWeightChunk
from schemas.errors import ControlCode, ControlError
from workers.control.deadline import Deadline
from workers.control.flow import Flow
from workers.control.weights import UNTOUCHED, Weights
from workers.engine_runner import EngineRunner

__all__ = ["Transfer"]

logger = logging.getLogger(__name__)

SILENCE_S: Final = 600.0
"""Between two commands of a transfer: whoever sends it is dead then, and the requests held up for it must not wait."""


class Transfer:
    """The transfer of weights into one worker; it never calls `Flow.go`.

    From a start until the finish the weights are half written, and requests in flight are held up.
    """

    def __init__(self, runner: EngineRunner, flow: Flow, weights: Weights) -> None:
        self._runner = runner
        self._flow = flow
        self._weights = weights
        self.heard_at = 0.0
        """When the engine last did a part of it, on the monotonic clock."""

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Transfer open={self.is_open}>"

    @property
    def is_open(self) -> bool:
        """It was started, and has not ended."""
        return self._weights.is_transferring

    async def init(self, command: InitWeightTransfer) -> None:
        """Set up the engine's transfer engine.

        Raises:
            ControlError: `unsupported`, `engine_error`, `timeout`.
            EngineDead: the engine is gone.
        """
        self._check_supported()
        async with Deadline(command.timeout_s).bound("setting up the transfer"):
            await self._runner.engine.init_weight_transfer(command.info)

    async def start(self, command: StartWeightUpdate) -> None:
        """Hold up the requests in flight and let weights come; one that is open begins anew, under its hold.

        Cancellation: as after a failure.

        Raises:
            ControlError: `unsupported`, `timeout` of holding up, `engine_error` unless one was open: the weights are as
                they were. Any other: they are poisoned, and what was in flight was given up.
            EngineDead: the engine is gone.
        """
        self._check_supported()
        deadline = Deadline(command.timeout_s)
        if not self.is_open:
            await self._weights.stop(command.mode, deadline)
        was_open, self._weights.is_transferring = self.is_open, True
        untouched = () if was_open else UNTOUCHED
        await self._pass_on(self._runner.engine.start_weight_update, deadline, "starting the transfer", untouched)

    async def chunk(self, command: UpdateWeightChunk) -> None:
        """Take some of the weights.

        Cancellation: as after a failure.

        Raises:
            ControlError: none was started, or the weights are poisoned and what was in flight was given up.
            EngineDead: the engine is gone.
        """
        self._check_open()
        engine = self._runner.engine
        deadline = Deadline(command.timeout_s)
        await self._pass_on(lambda: engine.update_weight_chunk(command.info), deadline, "taking weights")

    async def finish(self, command: FinishWeightUpdate, report: Callable[[str], None]) -> Canary | None:
        """Use the weights that came, once they are verified; where they are in use already, nothing happens.

        Returns:
            What they give; None: they are those of the start, which nobody has looked at.
        Cancellation: the weights are poisoned.

        Raises:
            ControlError: none was started, or the weights are poisoned and what was in flight was given up.
            EngineDead: the engine is gone.
        """
        if self._weights.is_current(command):
            return self._weights.canary
        self._check_open()
        deadline = Deadline(command.timeout_s)
        self._weights.distrust("the transfer was not finished")
        canary = await self._weights.replace(self._runner.engine.finish_weight_update, deadline, report)
        self._weights.stamp(command.version, None)
        return canary

    def lose(self) -> None:
        """This worker was away, and may have missed a part: what comes now would leave some of the weights old."""
        if self.is_open:
            self._weights.distrust("this worker was fenced in the middle of a transfer of weights")

    def expire(self, now: float) -> bool:
        """Give up a transfer of which nothing is heard any more: the weights are poisoned.

        Args:
            now: on the monotonic clock.

        Returns:
            It was given up now; the caller ends what is in flight.
        """
        if not self.is_open or now - self.heard_at <= SILENCE_S:
            return False
        self._weights.distrust(f"the transfer of weights went silent for {SILENCE_S:g} s")
        return True

    async def _pass_on(
        self,
        call: Callable[[], Awaitable[None]],
        deadline: Deadline,
        what: str,
        untouched: Collection[ControlCode] = (),
    ) -> None:
        """Have the engine do a part; unless it does, the transfer is over, and the weights are half written.

        Args:
            untouched: errors after which they are as they were.
        """
        is_spoilt = True
        try:
            async with deadline.bound(what):
                await call()
            is_spoilt = False
        except ControlError as exc:
            if exc.code in untouched:
                self._weights.is_transferring = is_spoilt = False
            raise
        finally:
            self.heard_at = time.monotonic()
            if is_spoilt:
                self._weights.distrust(f"{what} failed in the engine")
                self._flow.give_up("the weights of this worker are half written")

    def _check_supported(self) -> None:
        if not self._runner.engine.capabilities.weight_transfer:
            raise ControlError(ControlCode.UNSUPPORTED, "this engine has no weight transfer")

    def _check_open(self) -> None:
        if not self.is_open:
            raise ControlError(ControlCode.ENGINE_ERROR, "no transfer of weights was started here")
