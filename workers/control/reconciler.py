"""Reconciles a worker with its desired state: one register at a time, in the order in which commands were recorded.

A command only requests a read of the desired state. The outcome of each register is stored to answer commands later.
This module fetches nothing: a register becomes due when its source is staged, or when the staging has failed.

Invariant: a worker serves only after its current incarnation has read the desired state and applied all of it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from ...bus.protocol.fleet.desired import WEIGHTS
from ...bus.protocol.states import SPEAKING, WorkerEvent
from ...schemas.acks import AckStatus
from ...schemas.control import LORA_REGISTER, Drain, FinishWeightUpdate, Pause, PauseMode, Resume, Sleep, UpdateWeights
from ...schemas.errors import ControlCode, ControlError, EngineDead
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.presence import WorkerState
from ...schemas.weights import Canary, Staging, UpdateTiming
from ..lifecycle import WorkerLifecycle
from ..requests.in_flight import InFlightRequests
from ..requests.publisher import OutboundPublisher
from .desired import (
    PAUSE,
    SLEEP,
    DesiredReader,
    HandledRegister,
    PendingRegister,
    RegisterOutcome,
    failure,
    is_applied,
    next_due,
    pending_registers,
    repeat,
    target_event,
    weights_error,
)
from .loan import Loan
from .registers import Registers
from .staging import StageCost, StageKey, Stager, UnknownFailure, command_boundary

logger = logging.getLogger(__name__)


FETCH_RETRY_S: Final = 30.0
"""Seconds before a failed fetch of weights is tried again, because the store or the disk may work again."""
CUT_S = 1.0
"""Maximum seconds that a command waits until frames are published. Clients without credit and a slow network must not
delay a command further."""
MARGIN_S = 5.0
"""Seconds after its `timeout_s` at which a command is cancelled. Each step of a command checks `timeout_s` itself."""
WITHOUT_PAUSE = frozenset(
    {WorkerState.SERVING, WorkerState.OUTDATED, WorkerState.POISONED, WorkerState.WAITING_FOR_WEIGHTS}
)
"""States that a worker leaves when other weights are recorded. A paused, drained or sleeping worker keeps its state
while it stages these weights."""
RESET_S = 600.0
"""Maximum seconds to undo a register, which may include a load of weights."""


FIRST_READ_S: Final = 30.0
"""Maximum seconds before the start of the engine for the first read of the desired state, which shows if the worker is
lent. An election of a server takes less. Without the state the worker would not serve in any case."""


class Reconciler:
    """Applies due registers in one task.

    Args:
        engine_timeout_s: maximum seconds for a pause or resume of the engine.
    """

    def __init__(  # noqa: PLR0913 - there is one call site, which has all parts
        self,
        reader: DesiredReader,
        registers: Registers,
        stager: Stager,
        lifecycle: WorkerLifecycle,
        in_flight: InFlightRequests,
        publisher: OutboundPublisher,
        *,
        engine_timeout_s: float,
    ) -> None:
        self.reader = reader
        reader.on_read = self.on_read
        self.registers = registers
        self.stager = stager
        stager.on_change = self._on_staging
        self._lifecycle = lifecycle
        self._in_flight = in_flight
        self._publisher = publisher
        self._engine_timeout_s = engine_timeout_s
        self.on_change: Callable[[], None] = lambda: None
        """Called after a stage or an outcome has changed."""
        # Registers that were applied or failed, and registers that must be undone, by name.
        self._handled: dict[str, HandledRegister] = {}
        self._weights_failed_at = 0.0
        # The sources that the pending registers need, by register.
        self._needed: dict[str, tuple[StageKey, ...]] = {}
        # Epoch of the last pending weights, and the time at which they were first seen.
        self._weights_seen = (-1, 0.0)
        self._epoch_read = 0
        self.may_start = asyncio.Event()
        """Set when the engine may start and load its weights: the worker is not lent."""
        self._has_started = asyncio.Event()
        self.loan = Loan(reader, registers, self._handled, in_flight.runner)
        """The loan of this worker."""
        self._is_due = asyncio.Event()
        # Only one register is applied at a time, and some one-off commands must not run at the same time.
        self._lock = asyncio.Lock()
        # Register, epoch and time limit of a command that a later command may still cancel.
        self._waiting: tuple[str, int, asyncio.Timeout] | None = None
        # Register, epoch and stage of the command in progress.
        self._stage: tuple[str, int, str] | None = None
        # Number of the read that shows whether the finish of a transfer with an ended lease is recorded.
        self._finish_read: int | None = None
        self.epoch = 0
        """Epoch of the last applied desired state."""
        self._problem: str | None = None
        self.drain_reason: str | None = None
        """Reason of the worker's own drain, which no command undoes and no state records. None: there is none."""

    def start(self) -> None:
        """Start to reconcile, because the engine runs now."""
        self._has_started.set()

    @property
    def has_engine(self) -> bool:
        """True if the engine has started. A lent worker may be ready without it."""
        return self._has_started.is_set()

    @property
    def problem(self) -> str | None:
        """Reason why this worker does not serve, or None if it serves or is stopped as desired."""
        return self.loan.problem if self.registers.is_lent else self._problem

    async def _sleep_while_lent(self) -> None:
        """Before the start of the engine, sleep without it while this worker is lent, so that it loads nothing."""
        try:
            async with asyncio.timeout(FIRST_READ_S):
                while not self.reader.is_fresh:
                    await self._is_due.wait()
                    self._is_due.clear()
        except TimeoutError:
            logger.warning("loan.read_timed_out problem=%s", self.reader.problem)
            return
        if self.loan.recorded is None:
            return
        await self.loan.continue_term()
        self.loan.watch()
        await self._lifecycle.wait_alone()
        self.registers.begin_lent()
        await self._end_loan()
        if self.registers.is_lent:
            self._lifecycle.transition(WorkerEvent.SLEPT)
        while self.registers.is_lent:
            await self._apply_due()
            if self.registers.is_lent:
                await self._is_due.wait()
                self._is_due.clear()
        self.registers.end_lent()
        # The start loads the checkpoint, so all registers are applied again after it.
        for register in self._handled:
            repeat(self._handled, register)
        if self._lifecycle.state in SPEAKING:
            self._stop_serving()

    async def _end_loan(self) -> None:
        """Try to wake a lent worker that must wake, unless it hands over its requests and ends."""
        if self.drain_reason is None and await self.loan.try_wake():
            self.on_change()

    def _on_staging(self) -> None:
        self._is_due.set()
        self.on_change()

    def wake(self) -> None:
        """Wake the reconciler to check for due registers."""
        self._is_due.set()

    def drain(self, reason: str) -> None:
        """Accept no requests until the process ends, whatever is desired. Nothing is recorded.

        The state becomes `drained` as soon as no register is applied, unless a state with precedence applies. The
        caller hands over the open requests.
        """
        if self.drain_reason is not None:
            return
        self.drain_reason = reason
        if self._lifecycle.state in SPEAKING:
            self._stop_serving()
        self._is_due.set()

    def check_read(self) -> None:
        """Accept no requests while the desired state is unknown, and check the lease of an open transfer.

        Call this every second while connected. In a network partition the rest of the fleet may have continued without
        this worker.
        """
        if self._lifecycle.state is WorkerState.SERVING and not self.reader.is_fresh:
            logger.warning("desired.state_expired epoch=%s problem=%s", self.reader.epoch, self.reader.problem)
            self._stop_serving()
        if self.registers.transfer.watch(time.monotonic()):
            self._is_due.set()
        if self.loan.watch():
            self._is_due.set()

    def on_read(self) -> None:
        """Handle a newly read desired state."""
        if self.reader.is_lost:
            # The applied registers belong to the lost state, so all are due again.
            logger.warning("desired.lost epoch=%s was=%s", self.reader.epoch, self._epoch_read)
            for register in self._handled:
                repeat(self._handled, register)
        self._epoch_read = self.reader.epoch
        self.loan.watch()
        error = weights_error(self._handled)
        is_passing = error is not None and error.code is ControlCode.STORAGE
        if is_passing and time.monotonic() > self._weights_failed_at + FETCH_RETRY_S:
            repeat(self._handled, WEIGHTS)
        versions = self._in_flight.links.versions
        target = self.reader.target_version
        versions.target_version = versions.weight_version if target is None else target
        versions.desired_loras = self.reader.desired_loras
        versions.base_adapter_version = self.reader.base_adapter_version
        self._cancel_superseded()
        self._is_due.set()
        self.on_change()

    def _cancel_superseded(self) -> None:
        """Cancel the waiting command if a later command has replaced it."""
        if self._waiting is None:
            return
        (register, epoch, limit), now = self._waiting, asyncio.get_running_loop().time()
        ends_at = limit.when()
        # Do this only once, because an expired limit cannot be rescheduled.
        if self._recorded_epoch(register) != epoch and ends_at is not None and ends_at > now:
            limit.reschedule(now)

    def _recorded_epoch(self, register: str) -> int | None:
        """Return the epoch in which a register was recorded, or None if the register is not desired."""
        recorded = self.reader.effective.get(register)
        return None if recorded is None else recorded.epoch

    def outcome_of(self, register: str, epoch: int) -> RegisterOutcome | None:
        """Return the outcome of the command recorded in `epoch`, or None if it is not known yet."""
        if self._epoch_read < epoch:
            return None
        if self._recorded_epoch(register) != epoch:
            return failure(ControlError(ControlCode.STALE, f"a later command has set {register}"))
        handled = self._handled.get(register)
        if handled is not None and handled.epoch == epoch:
            return handled.outcome if handled.is_shown else None
        if register != SLEEP and self.loan.postpones(register):
            problem = "this worker is lent; it applies the command when it returns"
            return failure(ControlError(ControlCode.NOT_SERVING, problem))
        return None

    def progress_of(self, register: str, epoch: int) -> tuple[str, Staging | None] | None:
        """Return the stage of the command recorded in `epoch`, and the progress of the staging that it waits for.

        Return None if the command is not in progress.
        """
        staging = None
        if self._recorded_epoch(register) == epoch:
            waiting = map(self.stager.progress_of, self._needed.get(register, ()))
            staging = next((progress for progress in waiting if progress is not None), None)
        if self._stage is not None and self._stage[:2] == (register, epoch):
            return self._stage[2], staging
        return None if staging is None else (staging.stage, staging)

    def has_newer_weights(self, epoch: int | None) -> bool:
        """Return True if other weights were recorded after `epoch`, and False if `epoch` is None."""
        return epoch is not None and (self._recorded_epoch(WEIGHTS) or 0) > epoch

    @property
    def lora_problem(self) -> str | None:
        """Text with the adapters that differ from the desired state and the reasons, or None."""
        lines = [
            f"adapter {register.removeprefix(LORA_REGISTER)} differs from the desired state: "
            f"{handled.outcome.error.message}"
            for register, handled in sorted(self._handled.items())
            if register.startswith(LORA_REGISTER) and handled.outcome.error is not None
        ]
        return "; ".join(lines)[:MAX_ERROR_CHARS] or None

    @property
    def pause_mode(self) -> PauseMode | None:
        """The desired pause mode, or None if no pause is desired."""
        recorded = self.reader.effective.get(PAUSE)
        return recorded.command.mode if recorded is not None and isinstance(recorded.command, Pause) else None

    async def run(self) -> None:
        """Wait for `start`, verify the reload of the engine, then apply due registers until cancelled.

        Raises:
            EngineDead: the engine is dead, or its reload is wrong.
        """
        await self._sleep_while_lent()
        self.may_start.set()
        await self._has_started.wait()
        await self.registers.weights.verify_start()
        # Renew the lease, because the reload may have blocked this process for longer than the lease.
        await self._lifecycle.publish_presence()
        if self._lifecycle.state is WorkerState.STARTING:
            self._lifecycle.transition(WorkerEvent.READY)
        # Controllers did not wait for this worker while it started.
        self.reader.invalidate()
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            await self._apply_due()

    async def _apply_due(self) -> None:
        """Apply all due registers, then the target state."""
        async with self._lock:
            await self.end_transfers()
            if self.registers.is_lent and self._may_act():
                await self._end_loan()
        if not self.may_start.is_set() and not self.registers.is_lent:
            return  # the engine starts first
        while (due := self._prepare_due()) is not None:
            async with self._lock:
                await self._apply(due)
        async with self._lock:
            await self._apply_target_state()

    def _may_act(self) -> bool:
        return self.reader.is_fresh and self._lifecycle.may_publish()

    async def end_transfers(self) -> None:
        """End a transfer whose lease has ended. After the end of any transfer, make the desired weights due again.

        The caller executes no command of the transfer meanwhile.
        """
        transfer = self.registers.transfer
        reason = transfer.end_of_lease(time.monotonic())
        if reason is None:
            self._finish_read = None
        elif self._has_no_finish() and self._may_act():
            transfer.end(reason)
        if await transfer.recover():
            repeat(self._handled, WEIGHTS)

    def _has_no_finish(self) -> bool:
        """Return True if a read of the desired state that began after the end of the lease found no new weights."""
        if self._finish_read is None:
            self._finish_read = self.reader.request_read()
        return self.reader.num_read >= self._finish_read and all(due.register != WEIGHTS for due in self._pending())

    def _pending(self) -> list[PendingRegister]:
        """Return the registers to apply, without those that a lent worker postpones."""
        pending = pending_registers(self.loan.effective, self._handled)
        return [due for due in pending if not self.loan.postpones(due.register)]

    def _find_delayed(self) -> frozenset[str]:
        """Return the registers that are not applied yet: they wait for their sources, or for the end of a loan."""
        if not self.registers.is_asleep:
            return self._staging
        pending = {due.register for due in pending_registers(self.loan.effective, self._handled)}
        postponed = set(filter(self.loan.postpones, pending))
        if self.registers.is_deep and self.loan.must_wake and WEIGHTS in pending - postponed:
            # The engine wakes with the recorded weights, and loads no others before them.
            postponed.add(SLEEP)
        return self._staging | postponed

    @property
    def _staging(self) -> frozenset[str]:
        """Registers that wait for their sources."""
        is_staged = self.stager.is_staged
        return frozenset(register for register, keys in self._needed.items() if not all(map(is_staged, keys)))

    def _prepare_due(self) -> PendingRegister | None:
        """Stage the sources of pending registers, and only these. Return the register to apply now, or None.

        If other weights are recorded, accept no requests.
        """
        if not self._may_act():
            return None
        pending = {due.register: due.recorded for due in self._pending()}
        needed = {
            register: keys
            for register, recorded in pending.items()
            if (keys := self.registers.needed_for(None if recorded is None else recorded.command))
        }
        if needed != self._needed:
            self._needed = needed
            self.stager.set_desired([key for keys in needed.values() for key in keys])
        weights = pending.get(WEIGHTS)
        if weights is not None and weights.epoch != self._weights_seen[0]:
            self._weights_seen = weights.epoch, time.monotonic()
        if WEIGHTS in pending and self._lifecycle.state in WITHOUT_PAUSE:
            self._stop_serving()
        return next_due(self.loan.effective, self._handled, self._find_delayed()) if pending else None

    def _stop_serving(self) -> None:
        """Accept no requests until the worker reaches its target state."""
        if self._lifecycle.state in SPEAKING and self._lifecycle.state is not WorkerState.UPDATING:
            self._lifecycle.transition(WorkerEvent.CHANGED)
        self._in_flight.stop_intake()

    async def _apply(self, due: PendingRegister) -> None:
        self._show_outcomes()
        if due.recorded is None:
            self._stop_serving()
            await self._attempt(due, self.registers.reset(due.register, lambda _stage: None, RESET_S), RESET_S)
            self._handled.pop(due.register)
            return
        command, epoch = due.recorded.command, due.recorded.epoch
        source = self.registers.source_of(command)
        error = None if source is None else self.stager.error_of(source)
        self._stop_serving()
        if error is not None:
            self._add_outcome(due.register, HandledRegister(epoch, self._fail(due, error)))
            return
        logger.info("command.started command=%s epoch=%s", command.command, epoch)

        def report(stage: str) -> None:
            loop = asyncio.get_running_loop()
            if stage == "loading" and self._waiting is not None:
                # From here on, a cancellation would leave half-written weights.
                left_s = command.timeout_s + MARGIN_S
                self._waiting[2].reschedule(loop.time() + left_s)
                self._waiting = None
            self._stage = due.register, epoch, stage
            # A step that ends in this turn of the loop is not reported: the outcome follows at once.
            loop.call_soon(self.on_change)

        work = self.registers.apply(command, report)
        outcome = await self._attempt(due, work, command.timeout_s)
        self._stage = None
        if due.register == SLEEP:
            self.loan.note(due.recorded, outcome)
        logger.info("command.ended command=%s epoch=%s status=%s", command.command, epoch, outcome.status)
        # These outcomes are shown with the target state, which is not applied while a transfer is open. A failure is
        # shown immediately.
        is_shown_later = (
            isinstance(command, Resume | Drain | UpdateWeights | FinishWeightUpdate)
            and outcome.is_applied
            and not self.registers.weights.is_transferring
        )
        self._add_outcome(due.register, HandledRegister(epoch, outcome, is_shown=not is_shown_later))

    def _add_outcome(self, register: str, handled: HandledRegister) -> None:
        """Add the outcome of a register. Make sleep due again if another command has woken the engine."""
        self._handled[register] = handled
        if register == WEIGHTS and not handled.outcome.is_applied:
            self._weights_failed_at = time.monotonic()
        recorded = self.loan.effective.get(SLEEP)
        is_desired = recorded is not None and isinstance(recorded.command, Sleep)
        if is_desired and is_applied(self._handled, SLEEP) and not self.registers.is_asleep:
            repeat(self._handled, SLEEP)
        self.on_change()

    def _show_outcomes(self) -> None:
        """Show the outcomes that were not shown yet, so that their commands are answered."""
        for register, handled in self._handled.items():
            if not handled.is_shown:
                outcome = handled.outcome
                if register == WEIGHTS:
                    outcome = replace(outcome, timing=self._end_update())
                self._handled[register] = HandledRegister(handled.epoch, outcome)

    def _end_update(self) -> UpdateTiming | None:
        """Return the timing of an update that ends now, when the engine resumes. None if no weights were replaced."""
        weights = self.registers.weights
        cost = StageCost() if weights.source is None else self.stager.cost_of(StageKey(weights.source))
        timing = weights.clock.timing(self._weights_seen[1], cost, time.monotonic())
        if timing is not None:
            self.stager.stats.weights_paused_s += timing.paused_s
        return timing

    async def _attempt(self, due: PendingRegister, work: Awaitable[Canary | None], timeout_s: float) -> RegisterOutcome:
        """Execute `work`. The worker survives all its errors except `EngineDead`."""
        try:
            with command_boundary(due.register):
                async with asyncio.timeout(timeout_s + MARGIN_S) as limit:
                    if due.register in (PAUSE, WEIGHTS) and due.recorded is not None:
                        self._waiting = due.register, due.recorded.epoch, limit
                    canary = await work
                    # The work is done, so a later command must not cancel it.
                    self._waiting = None
                # The ack is published after both, so no frame with earlier tokens follows it.
                await self._publisher.wait_connected()
                await self._wait_sent()
        except ControlError as exc:
            if isinstance(exc, UnknownFailure) and due.register == WEIGHTS:
                self.registers.weights.mark_invalid(exc.message[:MAX_ERROR_CHARS])
            return self._fail(due, exc)
        except TimeoutError:
            if due.recorded is not None and self._recorded_epoch(due.register) != due.recorded.epoch:
                return self.outcome_of(due.register, due.recorded.epoch) or RegisterOutcome(status=AckStatus.STALE)
            return self._fail(due, ControlError(ControlCode.TIMEOUT, f"it was not done within {timeout_s:g} s"))
        finally:
            self._waiting = None
        verified = self.registers.weights.verified if due.register == WEIGHTS else None
        return RegisterOutcome(canary=canary, verified=verified, frames=self._in_flight.links.outbound.frame_counts())

    def _fail(self, due: PendingRegister, error: ControlError) -> RegisterOutcome:
        logger.error("command.apply_failed register=%s error=%s", due.register, error)
        return failure(error)

    async def _wait_sent(self) -> None:
        """Wait at most `CUT_S` until all frames are published."""
        try:
            async with asyncio.timeout(CUT_S):
                await self._publisher.wait_sent()
        except TimeoutError:
            logger.warning("command.frame_publish_timed_out links=%r", self._in_flight.links)

    @asynccontextmanager
    async def exclusive(self, *, halts: bool) -> AsyncIterator[None]:
        """Run the block between two registers.

        Args:
            halts: True to accept no requests during the block. After the block, requests are accepted only if the
                target state allows it.
        """
        async with self._lock:
            if halts:
                self._stop_serving()
            # If the block fails or is cancelled, the reconciler's own task applies the target state later.
            self._is_due.set()
            yield
            await self._apply_target_state()

    async def _apply_target_state(self) -> None:
        """Move to the target state. Do nothing while a register is due or the worker may not act."""
        is_unsettled = self._lifecycle.state is WorkerState.UPDATING and not self.registers.transfer.is_unsettled
        if not (is_unsettled or self.registers.is_lent) or not self._may_act():
            return
        effective, delayed = self.loan.effective, self._find_delayed()
        if next_due(effective, self._handled, delayed) is not None:
            return
        epoch, staging = self.reader.epoch, self._staging
        if self.registers.is_lent:
            # Commands that a lent worker postpones count as handled: its controllers do not wait for them.
            self.epoch = epoch
        if not is_unsettled:
            return
        weights, drain_reason = self.registers.weights, self.drain_reason
        stop = WorkerEvent.SLEPT if self.registers.is_asleep else None
        event = target_event(
            effective,
            self._handled,
            is_poisoned=weights.is_poisoned,
            has_conflict=weights.conflict is not None,
            stop=stop if drain_reason is None else WorkerEvent.DRAINED,
            staging=delayed,
        )
        self._problem = self._problem if event is None else self._problem_of(event)
        try:
            async with asyncio.timeout(self._engine_timeout_s):
                await self._apply_event(event)
        except TimeoutError:
            problem = f"the engine did not finish a pause or resume within {self._engine_timeout_s:g} s"
            raise EngineDead(problem) from None
        except ControlError as exc:
            raise EngineDead(f"the engine did not pause or resume: {exc.message}") from exc
        if not self._may_act() or self.drain_reason != drain_reason:
            return  # the worker was fenced in the meantime, or told to drain itself
        if not staging:
            self.epoch = epoch
        if event is not None:
            self._lifecycle.transition(event)
        self._show_outcomes()
        self.on_change()

    async def _apply_event(self, event: WorkerEvent | None) -> None:
        match event:
            case WorkerEvent.CAUGHT_UP:
                await self._in_flight.resume()
            case WorkerEvent.PAUSED if self.pause_mode == "keep":
                await self._in_flight.pause_engine()
            case None | WorkerEvent.PAUSED:
                # None: requests in flight continue while sources are staged. No new request is accepted.
                await self._in_flight.resume_engine()
            case WorkerEvent.SLEPT:
                self._waiting = None
            case _:
                self._in_flight.fail_for_retry(self.problem or "this worker is drained")
                if not self.registers.is_asleep:
                    await self._in_flight.resume_engine()
                await self._wait_sent()

    def _problem_of(self, event: WorkerEvent) -> str | None:
        weights, error = self.registers.weights, weights_error(self._handled)
        if event is WorkerEvent.SPOILT:
            problem = weights.problem or "its weights are invalid"
            return problem if error is None or error.message in problem else f"{problem}; {error.message}"
        if event in (WorkerEvent.MISSED, WorkerEvent.STRANDED):
            return weights.conflict if error is None else error.message
        return self.drain_reason
