"""Commands that set nothing: each is carried out once, by whoever hears it."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from schemas.control import (
    Abort,
    AnyCommand,
    CheckWeights,
    Fence,
    InitWeightTransfer,
    StartWeightUpdate,
    State,
    UpdateWeightChunk,
)
from schemas.errors import ControlCode, ControlError
from workers.control.parts import Parts
from workers.control.reconcile import Reconciler
from workers.control.registers import Registers

__all__ = ["Events"]


class Events:
    """Carries events out."""

    def __init__(self, parts: Parts, registers: Registers, reconciler: Reconciler) -> None:
        self._parts = parts
        self._registers = registers
        self._reconciler = reconciler

    def __repr__(self) -> str:
        """One line."""
        return f"<Events of {self._parts.config.worker_id}>"

    async def do(self, command: AnyCommand) -> dict[str, Any]:
        """Do what `command` says; returns what its `Ack` says besides.

        Raises:
            ControlError: it was not done.
            EngineDead: the engine is gone.
        """
        match command:
            case State():
                return {"state": msgspec.to_builtins(self._parts.describe())}
            case Abort():
                return await self._abort(command)
            case CheckWeights():
                await self._registers.weights.check(command)
            case Fence():
                await self._fence(command)
            case InitWeightTransfer():
                await self._transfer(lambda: self._registers.transfer.init(command), halts=False)
            case StartWeightUpdate():
                await self._transfer(lambda: self._registers.transfer.start(command), halts=True)
            case UpdateWeightChunk():
                await self._transfer(lambda: self._registers.transfer.chunk(command), halts=False)
            case _:
                raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} is no event")
        return {}

    async def _abort(self, command: Abort) -> dict[str, Any]:
        found = self._parts.links.called(set(command.request_ids))
        await self._parts.flow.end([name for names in found.values() for name in names])
        return {"request_ids": tuple(sorted(found))}

    async def _fence(self, command: Fence) -> None:
        if self._reconciler.has_newer_weights(command.epoch):
            raise ControlError(ControlCode.STALE, "later weights were recorded since")

        async def distrust() -> None:
            self._registers.weights.distrust(command.reason)

        await self._reconciler.exclusive(distrust, halts=True)

    async def _transfer(self, work: Callable[[], Awaitable[None]], *, halts: bool) -> None:
        if self._registers.is_asleep:
            raise ControlError(ControlCode.NOT_SERVING, "the engine is asleep")
        await self._reconciler.exclusive(work, halts=halts)
