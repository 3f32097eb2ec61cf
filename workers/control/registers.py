"""Applies recorded commands to the worker. The reconciler decides when a command is applied."""

import logging

from msgspec.structs import replace

from ...bus.protocol.fleet.desired import WEIGHTS
from ...bus.protocol.fleet.leases import check_finish
from ...schemas.control import (
    LORA_REGISTER,
    AnyCommand,
    Drain,
    FinishWeightUpdate,
    FlushCache,
    LoadLora,
    Pause,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
    Wake,
)
from ...schemas.errors import ControlCode, ControlError
from ...schemas.weights import Canary
from ..requests.in_flight import InFlightRequests
from ..sources.threads import Report
from .desired import SLEEP
from .loras import Loras
from .staging import StageKey
from .transfer import Transfer
from .weights import WeightManager

logger = logging.getLogger(__name__)

DEEP = 2
"""Sleep level after which the weights must be loaded again."""
_WAKING = (Wake, LoadLora, UnloadLora, FinishWeightUpdate, type(None))


class Registers:
    """Applies one register at a time, while the worker accepts no requests. Coroutines may raise `EngineDead`."""

    def __init__(self, in_flight: InFlightRequests, weights: WeightManager, loras: Loras, transfer: Transfer) -> None:
        self._in_flight = in_flight
        self.loras = loras
        self.weights = weights
        self.transfer = transfer
        self._sleep_level = 0
        self.is_lent = False
        """True from the sleep of a loan until its end: the engine must not wake, and nothing is staged."""

    def check_recording(self, command: AnyCommand, by: str) -> None:
        """Check that this worker could apply a finish that it is about to record. Accept every other command.

        Raises:
            ControlError: `transfer_expired`, `transfer_held`, `transfer_empty`.
        """
        if isinstance(command, FinishWeightUpdate) and not self.weights.is_current(command):
            check_finish(self.transfer.open, command, by)

    @property
    def is_asleep(self) -> bool:
        """True if the engine sleeps."""
        return self._sleep_level > 0

    @property
    def is_deep(self) -> bool:
        """True if the engine sleeps and has discarded its weights."""
        return self._sleep_level == DEEP

    def begin_lent(self) -> None:
        """Begin as a lent worker whose engine was not started, so that nothing is on the device."""
        self._sleep_level, self.is_lent = DEEP, True

    def end_lent(self) -> None:
        """End the sleep of an engine that was not started. The start loads its weights."""
        self._sleep_level, self.is_lent = 0, False

    def source_of(self, command: AnyCommand) -> StageKey | None:
        """Return the source that `command` needs, or None if it needs no source or is already applied."""
        match command:
            case UpdateWeights() if not self.weights.is_current(command):
                return StageKey(command.source)
            case LoadLora() if not self.loras.is_current(command):
                return StageKey(command.source, is_adapter=True)
        return None

    def needed_for(self, command: AnyCommand | None) -> tuple[StageKey, ...]:
        """Return all sources to stage before `command` is applied, so that its execution needs no network.

        Args:
            command: the recorded command, or None if the register is no longer desired.
        """
        source = None if command is None else self.source_of(command)
        keys = [] if source is None else [source]
        if isinstance(command, UpdateWeights):
            keys += self.loras.stage_keys if source is not None else ()
        elif self._sleep_level == DEEP and self.weights.source is not None and isinstance(command, _WAKING):
            # The engine has discarded its weights and will load these when it wakes.
            keys.append(StageKey(self.weights.source))
        return tuple(keys)

    async def apply(self, command: AnyCommand, report: Report) -> Canary | None:
        """Apply a command. Resume and drain take effect when the worker moves to its target state.

        Returns:
            The canary after a command that sets weights, else None.

        Raises:
            ControlError: the command was not applied.
        """
        if self.weights.is_transferring:
            self._check_in_transfer(command)
        if isinstance(command, _WAKING):
            await self._wake(report, command.timeout_s)
        match command:
            case Pause():
                await self._pause(command, report)
            case Resume() | Wake():
                pass
            case Drain():
                self._in_flight.fail_for_retry("this worker is drained")
            case FlushCache():
                await self._flush_cache(report, preempt=command.preempt)
            case Sleep():
                await self._sleep(command, report)
            case UpdateWeights():
                return await self._update(command, report)
            case FinishWeightUpdate():
                return await self._finish(command, report)
            case LoadLora():
                await self.loras.load(command, report)
            case UnloadLora():
                await self.loras.unload(command)
            case _:
                raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} does not set a register")
        return None

    def _check_in_transfer(self, command: AnyCommand) -> None:
        """Check that `command` needs no engine step, which half-written weights do not allow.

        Raises:
            ControlError: `not_serving`. A desired pause or resume is applied after the end of the transfer.
        """
        match command:
            case Resume():
                problem = "it resumes after the end of the transfer"
            case Pause(mode="wait") if self._in_flight.count:
                problem = f"its {self._in_flight.count} requests in flight cannot finish before the end of the transfer"
            case Sleep() | LoadLora() | UnloadLora():
                problem = "send the command again after the end of the transfer"
            case _:
                return
        raise ControlError(ControlCode.NOT_SERVING, f"a transfer of weights is open on this worker; {problem}")

    async def _update(self, command: UpdateWeights, report: Report) -> Canary | None:
        if await self._wake_engine() == DEEP:
            self.weights.mark_invalid("the engine discarded its weights for a deep sleep")
        canary = await self.weights.update(await self._abandon_transfer(command), report)
        self.transfer.last_end = None
        return canary

    async def _abandon_transfer(self, command: UpdateWeights) -> UpdateWeights:
        """End an open transfer. Return the update in a mode that needs no engine step on half-written weights."""
        if not self.weights.is_transferring or command.mode == "keep":
            return command
        if command.mode == "abort":
            await self._in_flight.abort_and_wait(self._in_flight.links.requests.names_using(None))
        self._in_flight.fail_for_retry("a weight update replaced an open transfer of weights into this worker")
        return replace(command, mode="keep", clear_cache=command.clear_cache is not False)

    async def reset(self, register: str, report: Report, timeout_s: float) -> None:
        """Undo a register that is no longer desired. Valid weights stay.

        Raises:
            ControlError: the register was not undone.
        """
        if register == SLEEP:
            await self._wake(report, timeout_s)
        elif self.weights.is_transferring:
            raise ControlError(ControlCode.NOT_SERVING, "a transfer of weights is open on this worker")
        elif register == WEIGHTS:
            if self.weights.is_poisoned and not self.is_asleep:
                # This happens if the first update of the weights failed on all workers.
                await self._in_flight.stop("abort", timeout_s)
                await self.weights.restore(report, timeout_s)
        elif register.startswith(LORA_REGISTER):
            name = register.removeprefix(LORA_REGISTER)
            await self.loras.unload(UnloadLora(name=name, timeout_s=timeout_s))

    async def _pause(self, command: Pause, report: Report) -> None:
        if self.is_asleep:
            return
        report("pausing")
        if self.weights.is_transferring:
            # The requests are stopped already, and the engine must stay paused.
            if command.mode == "abort":
                await self._in_flight.abort_all(command.timeout_s)
        else:
            await self._in_flight.stop(command.mode, command.timeout_s)
        if command.clear_cache:
            await self._flush_cache(report, preempt=command.mode == "keep")

    async def _flush_cache(self, report: Report, *, preempt: bool) -> None:
        if not self.is_asleep:
            report("flushing")
            await self._in_flight.reset_cache(preempt=preempt)

    async def _sleep(self, command: Sleep, report: Report) -> None:
        if self._sleep_level == command.level or self.is_lent:
            # A lent engine has freed everything, and another process may use its memory.
            return
        if not self._in_flight.runner.engine.capabilities.sleep:
            raise ControlError(ControlCode.UNSUPPORTED, "this engine cannot sleep")
        await self._wake(report, command.timeout_s)
        self._in_flight.fail_for_retry("this worker goes to sleep")
        await self._in_flight.stop("abort", command.timeout_s)
        with self._in_flight.runner.emptying_cache():
            await self._in_flight.runner.engine.sleep(command.level)
        self._sleep_level = command.level

    async def _wake(self, report: Report, timeout_s: float) -> None:
        """Wake the engine if it sleeps, and restore its weights."""
        if await self._wake_engine() == DEEP:
            await self.weights.restore(report, timeout_s)

    async def _wake_engine(self) -> int:
        """Wake the engine. Return its previous sleep level, or 0 if it did not sleep."""
        if self.is_asleep:
            await self._in_flight.runner.engine.wake()
        level, self._sleep_level = self._sleep_level, 0
        return level

    async def _finish(self, command: FinishWeightUpdate, report: Report) -> Canary | None:
        if self.weights.is_transferring or self.weights.is_current(command):
            return await self.transfer.finish(command, report)
        problem = f"the weights of version {command.version} arrived through a transfer engine"
        if (end := self.transfer.last_end) is None:
            raise ControlError(ControlCode.NOT_FOUND, f"{problem}, but not on this worker")
        raise ControlError(ControlCode.TRANSFER_EXPIRED, f"{problem} and cannot be loaded again; {end}")
