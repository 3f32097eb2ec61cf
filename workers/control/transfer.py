"""Weights that arrive through the engine's own transfer engine. The worker verifies them like all other weights.

A transfer has a lease (`rollbus.bus.protocol.fleet.leases`). After its end without a finish, the engine must
answer, and the worker loads the desired weights again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final

from ...bus.protocol.fleet.leases import TransferLease, check_continues, check_finish
from ...schemas.control import (
    CancelWeightUpdate,
    FinishWeightUpdate,
    InitWeightTransfer,
    StartWeightUpdate,
    UpdateWeightChunk,
)
from ...schemas.errors import ControlCode, ControlError, EngineDead
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.options import DEFAULT_IDLE_S
from ...schemas.weights import Canary, OpenTransfer
from ..requests.in_flight import InFlightRequests
from ..sources.threads import Report
from .staging import Deadline
from .weights import UNTOUCHED, WeightManager

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds for the engine to answer after the end of a transfer. A call of NCCL whose peer is gone never returns and
cannot be cancelled, so only a new process helps."""
ANSWERED: Final = frozenset(ControlCode) - {ControlCode.TIMEOUT, ControlCode.TRANSFER_EXPIRED}
"""Errors of a call that the engine has answered."""


class Transfer:
    """The transfer of weights into one worker. This class never calls `InFlightRequests.resume`.

    From `start` until `finish` the weights are half written, and requests in flight are stopped.
    Every coroutine raises `EngineDead` if the engine is dead.

    Args:
        idle_s: seconds without a command after which an open transfer ends.
        heard_at: returns the monotonic time of the last presence of a client, or None.
    """

    def __init__(
        self,
        in_flight: InFlightRequests,
        weights: WeightManager,
        idle_s: float = DEFAULT_IDLE_S,
        heard_at: Callable[[str], float | None] = lambda _client: None,
    ) -> None:
        self._in_flight = in_flight
        self._weights = weights
        self._idle_s = idle_s
        self._heard_at = heard_at
        self._lease: TransferLease | None = None
        # The lease of the command in progress, and the limit that ends this command early.
        self._busy: tuple[TransferLease, asyncio.Timeout] | None = None
        self._interruption = ""
        self._unhandled: str | None = None
        self.last_end: str | None = None
        """Reason why the last transfer ended without a finish, or None."""

    @property
    def open(self) -> OpenTransfer | None:
        """The open transfer, or None."""
        lease = self._open_lease
        return None if lease is None else lease.describe(time.monotonic(), self._idle_s)

    @property
    def is_unsettled(self) -> bool:
        """True if a transfer is open, or has ended and `recover` was not called yet."""
        return self._weights.is_transferring or self._unhandled is not None

    @property
    def _open_lease(self) -> TransferLease | None:
        return self._lease if self._weights.is_transferring else None

    async def init(self, command: InitWeightTransfer, by: str) -> None:
        """Set up the engine's transfer engine for the owner `by`.

        Raises:
            ControlError: `unsupported`, `engine_error`, `timeout`; `transfer_held`: another owner has a transfer open.
        """
        self._check_may_begin(by)
        engine, deadline = self._in_flight.runner.engine, Deadline(command.timeout_s)
        lease = self._open_lease or self._new_lease(command.id, by)
        await self._call(
            lease, lambda: engine.init_weight_transfer(command.info), deadline, "setting up the transfer", ANSWERED
        )

    async def start(self, command: StartWeightUpdate, by: str) -> None:
        """Stop the requests in flight and begin a transfer of the owner `by`. If its transfer is open, restart it.

        Cancellation: the weights are invalid, as after a failure.

        Raises:
            ControlError: `unsupported`, `transfer_held`, `timeout` of the stop, or `engine_error` without an open
                transfer: the weights are unchanged. After any other error the transfer has ended.
        """
        self._check_may_begin(by)
        deadline = Deadline(command.timeout_s)
        if not self._weights.is_transferring:
            await self._weights.stop(command.mode, deadline)
        was_open, self._weights.is_transferring = self._weights.is_transferring, True
        self._lease, self.last_end = self._new_lease(command.id, by), None
        untouched = () if was_open else UNTOUCHED
        engine = self._in_flight.runner.engine
        try:
            await self._call(self._lease, engine.start_weight_update, deadline, "starting the transfer", untouched)
        except ControlError as exc:
            if exc.code in untouched:
                self._weights.is_transferring = False
            raise

    async def add_chunk(self, command: UpdateWeightChunk, by: str) -> None:
        """Pass one part of the weights to the engine.

        Cancellation: the weights are invalid, as after a failure.

        Raises:
            ControlError: `transfer_expired`, `transfer_held`: nothing was changed. After any other error the transfer
                has ended, and the requests in flight have failed.
        """
        check_continues(self.open, command.transfer, by)
        lease, engine = self._open_lease, self._in_flight.runner.engine
        if lease is not None:
            deadline = Deadline(command.timeout_s)
            await self._call(lease, lambda: engine.update_weight_chunk(command.info), deadline, "receiving weights")
            lease.chunks += 1

    async def finish(self, command: FinishWeightUpdate, report: Report) -> Canary | None:
        """Verify and use the received weights. Do nothing if they are in use already.

        Returns:
            The canary of the weights, or None for the weights of the start, which have no canary.
        Cancellation: the weights are invalid.

        Raises:
            ControlError: `transfer_expired`: another transfer is open, or none. After any other error the transfer has
                ended, and the requests in flight have failed.
        """
        if self._weights.is_current(command):
            return self._weights.canary
        try:
            check_finish(self.open, command, None)
        except ControlError as exc:
            if exc.code is ControlCode.TRANSFER_EMPTY:
                self.end(exc.message)
            raise
        deadline = Deadline(command.timeout_s)
        self._weights.mark_invalid("the transfer was not finished")
        has_answered = False
        try:
            canary = await self._weights.replace(self._in_flight.runner.engine.finish_weight_update, deadline, report)
            has_answered = True
        except ControlError as exc:
            has_answered = exc.code in ANSWERED
            raise
        finally:
            if not has_answered:
                self.end("the engine did not finish it in time")
        self._weights.set_version(command.version, None)
        return canary

    # Ends

    def end(self, reason: str, *, fails_requests: bool = True) -> None:
        """End the transfer, if one is open. `recover` must follow.

        Args:
            fails_requests: True to hand the requests in flight to other workers.
        """
        self.last_end = self._unhandled = f"the transfer of weights ended: {reason}"[:MAX_ERROR_CHARS]
        logger.warning("transfer.ended lease=%s reason=%s", self._lease, reason)
        if self._weights.is_transferring:
            self._weights.mark_invalid(self.last_end, keeps_canary=True)
            if fails_requests:
                self._in_flight.fail_for_retry(self.last_end)

    def mark_lost(self) -> None:
        """End an open transfer, because a fenced worker may have missed a part. The caller removes the requests."""
        if self._weights.is_transferring:
            self.end("this worker was fenced", fails_requests=False)

    def watch(self, now: float) -> bool:
        """Handle the presence of the owner. Call this every second while connected.

        A command in progress ends if its owner is lost. Return True if the lease of the open transfer has ended, or if
        `recover` must be called.
        """
        for lease in filter(None, (self._open_lease, self._busy and self._busy[0])):
            lease.note_presence(self._heard_at(lease.by))
        if self._busy is not None and (loss := self._busy[0].loss(now)) is not None:
            self._interrupt(loss)
        return self._unhandled is not None or self.end_of_lease(now) is not None

    def end_of_lease(self, now: float) -> str | None:
        """Return the reason why the lease of the open transfer has ended at `now` (monotonic), or None."""
        lease = self._open_lease
        return None if lease is None else lease.end(now, self._idle_s)

    def interrupt(self, command: CancelWeightUpdate, by: str) -> bool:
        """End the command in progress of the transfer that `command` cancels. `cancel` must follow.

        Return True if this transfer is open, or if a command was ended.

        Raises:
            ControlError: `transfer_expired`: another transfer is open.
        """
        if (found := self.open) is not None:
            check_continues(found, command.transfer, None)
        # A setup in progress belongs to no open transfer.
        if self._busy is not None and command.transfer in {None, self._busy[0].id}:
            self._interrupt(f"{by} cancelled it")
            return True
        return found is not None

    def cancel(self, command: CancelWeightUpdate, by: str, *, was_found: bool = False) -> None:
        """End the open transfer.

        Args:
            was_found: the result of `interrupt`. If True, the transfer may have ended meanwhile.

        Raises:
            ControlError: `transfer_expired`: another transfer is open, or none.
        """
        if (found := self.open) is not None:
            check_continues(found, command.transfer, None)
            self.end(f"{by} cancelled it")
        elif not was_found:
            raise ControlError(ControlCode.TRANSFER_EXPIRED, "no transfer of weights is open")

    async def recover(self) -> bool:
        """After an end, wait until the engine answers. Return True if the desired weights must be loaded again.

        Raises:
            EngineDead: the engine does not answer. The requests in flight have failed as retryable.
        """
        if self._unhandled is None:
            return False
        reason, self._unhandled = self._unhandled, None
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._in_flight.runner.engine.abandon_weight_update()
        except TimeoutError:
            self._in_flight.fail_for_retry(reason)
            raise EngineDead(f"{reason}; the engine did not answer within {ANSWER_S:g} s after it") from None
        except ControlError as exc:
            # The load of the desired weights shows whether the engine is usable.
            logger.warning("transfer.abandon_failed error=%s", exc)
        return self._weights.is_poisoned

    async def _call(
        self,
        lease: TransferLease,
        call: Callable[[], Awaitable[None]],
        deadline: Deadline,
        what: str,
        harmless: Collection[ControlCode] = (),
    ) -> None:
        """Forward a command to the engine. A failure ends the transfer with half-written weights.

        Args:
            what: name of the command in errors.
            harmless: error codes after which the transfer is as before the call.
        """
        is_failed, lease.is_busy = True, True
        problem = f"{what} was not done in time"
        try:
            async with deadline.bound(what), self._until_interrupted(lease):
                await call()
            is_failed = False
        except ControlError as exc:
            problem, is_failed = f"{what} failed: {exc.message}", exc.code not in harmless
            raise
        finally:
            lease.is_busy, lease.last_command_at = False, time.monotonic()
            if is_failed:
                self.end(problem)

    @asynccontextmanager
    async def _until_interrupted(self, lease: TransferLease) -> AsyncIterator[None]:
        """Run the block until `_interrupt`, which makes it raise `transfer_expired`."""
        try:
            async with asyncio.timeout(None) as limit:
                self._busy = lease, limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise ControlError(ControlCode.TRANSFER_EXPIRED, self._interruption) from None
        finally:
            self._busy = None

    def _interrupt(self, reason: str) -> None:
        if self._busy is not None and self._busy[1].when() is None:
            self._interruption = reason
            self._busy[1].reschedule(asyncio.get_running_loop().time())

    def _new_lease(self, transfer: str, by: str) -> TransferLease:
        now = time.monotonic()
        return TransferLease(transfer, by, now, now, self._heard_at(by))

    def _check_may_begin(self, by: str) -> None:
        if not self._in_flight.runner.engine.capabilities.weight_transfer:
            raise ControlError(ControlCode.UNSUPPORTED, "this engine does not support weight transfer")
        if (found := self.open) is not None:
            check_continues(found, None, by)
