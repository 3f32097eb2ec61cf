"""Weights that arrive through the engine's own transfer engine. The worker verifies them like all other weights."""

import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from ...schemas.control import Canary, FinishWeightUpdate, InitWeightTransfer, StartWeightUpdate, UpdateWeightChunk
from ...schemas.errors import ControlCode, ControlError
from ..requests.in_flight import InFlightRequests
from ..sources import Report
from .deadline import Deadline
from .weights import UNTOUCHED, WeightManager

__all__ = ["Transfer"]

logger = logging.getLogger(__name__)

SILENCE_S: Final = 600.0
"""Seconds without a command after which the sender of a transfer counts as dead."""


class Transfer:
    """The transfer of weights into one worker. This class never calls `InFlightRequests.resume`.

    From `start` until `finish` the weights are half written, and requests in flight are stopped.
    Every coroutine raises `EngineDead` if the engine is dead.
    """

    def __init__(self, in_flight: InFlightRequests, weights: WeightManager) -> None:
        self._in_flight = in_flight
        self._weights = weights
        self.last_command_at = 0.0
        """Monotonic time of the last command of the transfer that the engine handled."""

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Transfer open={self._weights.is_transferring}>"

    async def init(self, command: InitWeightTransfer) -> None:
        """Set up the engine's transfer engine.

        Raises:
            ControlError: `unsupported`, `engine_error`, `timeout`.
        """
        self._check_supported()
        async with Deadline(command.timeout_s).bound("setting up the transfer"):
            await self._in_flight.runner.engine.init_weight_transfer(command.info)

    async def start(self, command: StartWeightUpdate) -> None:
        """Stop the requests in flight and begin a transfer. If a transfer is open, restart it.

        Cancellation: the weights are invalid, as after a failure.

        Raises:
            ControlError: `unsupported`, `timeout` of the stop, or `engine_error` without an open transfer: the weights
                are unchanged. After any other error they are invalid, and the requests in flight have failed.
        """
        self._check_supported()
        deadline = Deadline(command.timeout_s)
        if not self._weights.is_transferring:
            await self._weights.stop(command.mode, deadline)
        was_open, self._weights.is_transferring = self._weights.is_transferring, True
        untouched = () if was_open else UNTOUCHED
        await self._forward(
            self._in_flight.runner.engine.start_weight_update, deadline, "starting the transfer", untouched
        )

    async def add_chunk(self, command: UpdateWeightChunk) -> None:
        """Pass one part of the weights to the engine.

        Cancellation: the weights are invalid, as after a failure.

        Raises:
            ControlError: no transfer is open, or the weights are invalid and the requests in flight have failed.
        """
        self._check_open()
        engine = self._in_flight.runner.engine
        deadline = Deadline(command.timeout_s)
        await self._forward(lambda: engine.update_weight_chunk(command.info), deadline, "receiving weights")

    async def finish(self, command: FinishWeightUpdate, report: Report) -> Canary | None:
        """Verify and use the received weights. Do nothing if they are in use already.

        Returns:
            The canary of the weights, or None for the weights of the start, which have no canary.
        Cancellation: the weights are invalid.

        Raises:
            ControlError: no transfer is open, or the weights are invalid and the requests in flight have failed.
        """
        if self._weights.is_current(command):
            return self._weights.canary
        self._check_open()
        deadline = Deadline(command.timeout_s)
        self._weights.mark_invalid("the transfer was not finished")
        canary = await self._weights.replace(self._in_flight.runner.engine.finish_weight_update, deadline, report)
        self._weights.set_version(command.version, None)
        return canary

    def mark_lost(self) -> None:
        """Mark the weights invalid if a transfer is open, because a fenced worker may have missed a part."""
        if self._weights.is_transferring:
            self._weights.mark_invalid("this worker was fenced during a transfer of weights")

    def expire(self, now: float) -> bool:
        """Mark the weights invalid if the open transfer had no command for `SILENCE_S` at `now` (monotonic).

        Return True if the weights were marked. The caller then fails the requests in flight.
        """
        if not self._weights.is_transferring or now - self.last_command_at <= SILENCE_S:
            return False
        self._weights.mark_invalid(f"the open transfer of weights received no command for {SILENCE_S:g} s")
        return True

    async def _forward(
        self,
        call: Callable[[], Awaitable[None]],
        deadline: Deadline,
        what: str,
        untouched: Collection[ControlCode] = (),
    ) -> None:
        """Forward a command to the engine. A failure ends the transfer with half-written weights.

        Args:
            what: name of the command in errors.
            untouched: error codes after which the weights are unchanged.
        """
        is_invalid = True
        try:
            async with deadline.bound(what):
                await call()
            is_invalid = False
        except ControlError as exc:
            if exc.code in untouched:
                self._weights.is_transferring = is_invalid = False
            raise
        finally:
            self.last_command_at = time.monotonic()
            if is_invalid:
                self._weights.mark_invalid(f"{what} failed in the engine")
                self._in_flight.fail_for_retry("the weights of this worker are half written")

    def _check_supported(self) -> None:
        if not self._in_flight.runner.engine.capabilities.weight_transfer:
            raise ControlError(ControlCode.UNSUPPORTED, "this engine does not support weight transfer")

    def _check_open(self) -> None:
        if not self._weights.is_transferring:
            raise ControlError(ControlCode.ENGINE_ERROR, "no transfer of weights is open on this worker")
