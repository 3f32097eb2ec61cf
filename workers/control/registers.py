"""What each recorded command does to the worker: one method for each register, nothing that decides when."""

import logging
from collections.abc import Callable

from msgspec.structs import replace

from bus.protocol.desired import WEIGHTS
from schemas.control import (
    LORA_REGISTER,
    AnyCommand,
    Canary,
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
from schemas.errors import ControlCode, ControlError
from workers.control.desire import SLEEP
from workers.control.flow import Flow
from workers.control.loras import Loras
from workers.control.transfer import Transfer
from workers.control.weights import Weights
from workers.engine_runner import EngineRunner

__all__ = ["Registers"]

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


class Registers:
    """Brings one register at a time to what a command says; requests are not taken meanwhile."""

    def __init__(self, runner: EngineRunner, flow: Flow, weights: Weights, loras: Loras, transfer: Transfer) -> None:
        self._runner = runner
        self._flow = flow
        self._loras = loras
        self.weights = weights
        self.transfer = transfer
        self._sleep_level = 0

    def __repr__(self) -> str:
        """One line with the parts."""
        return f"<Registers sleep_level={self._sleep_level} {self.weights!r} {self._loras!r} {self.transfer!r}>"

    @property
    def is_asleep(self) -> bool:
        """The engine has given up its memory."""
        return self._sleep_level > 0

    @property
    def problem(self) -> str | None:
        """What was had and is lost; None: nothing."""
        return self._loras.problem

    async def bring(self, command: AnyCommand, report: Report) -> Canary | None:
        """Do what a command says; resume and drain show once the worker settles.

        Returns:
            What the weights give, after a command about weights.

        Raises:
            ControlError: it was not done.
            EngineDead: the engine is gone.
        """
        if self.transfer.is_open:
            self._check_in_transfer(command)
        match command:
            case Pause():
                await self._pause(command, report)
            case Resume():
                pass
            case Drain():
                self._flow.give_up("this worker is drained")
            case FlushCache():
                await self._flush(command, report)
            case Sleep():
                await self._sleep(command, report)
            case Wake():
                await self._wake(report, command.timeout_s)
            case _:
                return await self._load(command, report)
        return None

    def _check_in_transfer(self, command: AnyCommand) -> None:
        """Refuse what cannot be had from half-written weights, with which the engine must make no step.

        Raises:
            ControlError: `not_serving`; what is desired of the flow is seen to when the transfer has ended.
        """
        match command:
            case Resume():
                problem = "it goes on when that has ended"
            case Pause(mode="wait") if self._flow.in_flight:
                problem = f"{self._flow.in_flight} requests in flight stand still until that has ended"
            case Sleep() | LoadLora() | UnloadLora():
                problem = "once that has ended this can be done"
            case _:
                return
        raise ControlError(ControlCode.NOT_SERVING, f"a transfer of weights has begun here; {problem}")

    async def _load(self, command: AnyCommand, report: Report) -> Canary | None:
        if not isinstance(command, UpdateWeights):
            await self._wake(report, command.timeout_s)
        match command:
            case UpdateWeights():
                if await self._wake_engine() == 2:
                    self.weights.distrust("the engine has dropped them to sleep")
                return await self.weights.update(await self._break_off(command), report)
            case FinishWeightUpdate():
                return await self._finish(command, report)
            case LoadLora():
                if not self._loras.is_current(command):
                    await self._loras.load(command, report)
            case UnloadLora():
                await self._loras.unload(command)
            case _:
                raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} sets no register")
        return None

    async def _break_off(self, command: UpdateWeights) -> UpdateWeights:
        """The same update, without steps on half-written weights where a transfer is open."""
        if not self.transfer.is_open or command.mode == "keep":
            return command
        if command.mode == "abort":
            await self._flow.end_where(lambda _lora: True)
        self._flow.give_up("a transfer of weights into this worker was broken off")
        return replace(command, mode="keep", clear_cache=command.clear_cache is not False)

    async def reset(self, register: str, report: Report, timeout_s: float) -> None:
        """Nothing is desired of a register any more: undo what was, except weights, which stay, or are those before.

        Raises:
            ControlError: it was not done.
            EngineDead: the engine is gone.
        """
        if register == SLEEP:
            await self._wake(report, timeout_s)
        elif self.transfer.is_open:
            raise ControlError(ControlCode.NOT_SERVING, "a transfer of weights has begun here")
        elif register == WEIGHTS:
            if self.weights.is_poisoned and not self.is_asleep:
                # As after an update that failed everywhere, before which nobody had been told anything.
                await self._flow.stop("abort", timeout_s)
                await self.weights.restore(report, timeout_s)
        elif register.startswith(LORA_REGISTER):
            name = register.removeprefix(LORA_REGISTER)
            await self._loras.unload(UnloadLora(name=name, timeout_s=timeout_s))

    async def _pause(self, command: Pause, report: Report) -> None:
        if self.is_asleep:
            return
        report("pausing")
        if self.transfer.is_open:
            # Stopped already, and the engine must not move.
            if command.mode == "abort":
                await self._flow.end_all(command.timeout_s)
        else:
            await self._flow.stop(command.mode, command.timeout_s)
        if command.clear_cache:
            report("flushing")
            await self._reset_cache(preempt=command.mode == "keep")

    async def _flush(self, command: FlushCache, report: Report) -> None:
        if self.is_asleep:
            return
        report("flushing")
        await self._reset_cache(preempt=command.preempt)

    async def _reset_cache(self, *, preempt: bool) -> None:
        if not await self._runner.engine.reset_cache(preempt=preempt):
            raise ControlError(
                ControlCode.CACHE_IN_USE,
                f"the prefix cache could not be reset: {self._flow.in_flight} requests in flight hold parts of it",
            )

    async def _sleep(self, command: Sleep, report: Report) -> None:
        if self._sleep_level == command.level:
            return
        if not self._runner.engine.capabilities.sleep:
            raise ControlError(ControlCode.UNSUPPORTED, "this engine cannot sleep")
        await self._wake(report, command.timeout_s)
        self._flow.give_up("it goes to sleep")
        await self._flow.stop("abort", command.timeout_s)
        await self._runner.engine.sleep(command.level)
        self._sleep_level = command.level

    async def _wake(self, report: Report, timeout_s: float) -> None:
        """Wake the engine if it sleeps, with the weights that it had."""
        if await self._wake_engine() == 2:
            await self.weights.restore(report, timeout_s)

    async def _wake_engine(self) -> int:
        """Returns how deep it slept; 0: it did not."""
        if self.is_asleep:
            await self._runner.engine.wake()
        level, self._sleep_level = self._sleep_level, 0
        return level

    async def _finish(self, command: FinishWeightUpdate, report: Report) -> Canary | None:
        if self.transfer.is_open or self.weights.is_current(command):
            return await self.transfer.finish(command, report)
        raise ControlError(
            ControlCode.NOT_FOUND,
            f"the weights of version {command.version} came by a transfer engine, which this worker has not heard",
        )
