"""One-off commands, which are not in the desired state. A worker executes each of them once."""

from typing import Any

import msgspec

from ...schemas import limits
from ...schemas.control import (
    Abort,
    AnyCommand,
    CancelWeightUpdate,
    CheckWeights,
    Fence,
    InitWeightTransfer,
    StartWeightUpdate,
    State,
    UpdateWeightChunk,
)
from ...schemas.errors import ControlCode, ControlError
from ...schemas.weights import Staging, UpdateTiming
from ..lifecycle.lifecycle import WorkerLifecycle
from ..requests.in_flight import InFlightRequests
from .reads import TelemetryReads
from .reconcile import Reconciler
from .staging import StageKey

__all__ = ["OneOffCommands"]


class OneOffCommands:
    """Executes one-off commands. Coroutines may raise `EngineDead`.

    Attributes:
        reads: answers read commands.
    """

    def __init__(
        self, lifecycle: WorkerLifecycle, in_flight: InFlightRequests, reconciler: Reconciler, reads: TelemetryReads
    ) -> None:
        self._lifecycle = lifecycle
        self._in_flight = in_flight
        self._reconciler = reconciler
        self._registers = reconciler.registers
        self.reads = reads

    async def execute(self, command: AnyCommand, by: str) -> dict[str, Any]:
        """Execute `command` for its author. Return the additional fields of its `Ack`.

        Raises:
            ControlError: the command failed.
        """
        match command:
            case State():
                return {"state": msgspec.to_builtins(self._lifecycle.describe())}
            case Abort():
                return await self._abort(command)
            case CheckWeights():
                return await self._check(command)
            case Fence():
                if self._reconciler.has_newer_weights(command.epoch):
                    raise ControlError(ControlCode.STALE, "later weights were recorded after the command")
                async with self._reconciler.exclusive(halts=True):
                    self._registers.weights.mark_invalid(command.reason)
            case InitWeightTransfer() | StartWeightUpdate() | UpdateWeightChunk():
                await self._transfer(command, by)
            case CancelWeightUpdate():
                was_found = self._registers.transfer.interrupt(command, by)
                async with self._reconciler.exclusive(halts=False):
                    self._registers.transfer.cancel(command, by, was_found=was_found)
            case _:
                raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} is not a one-off command")
        return {}

    def progress_of(self, command: AnyCommand) -> Staging | None:
        """Return the progress of the staging that a check waits for, or None if the command waits for no staging."""
        if not isinstance(command, CheckWeights):
            return None
        return self._reconciler.stager.progress_of(StageKey(command.source, command.adapter))

    async def _check(self, command: CheckWeights) -> dict[str, Any]:
        """Stage the source of a check, so that an update with it can follow."""
        stager, key = self._reconciler.stager, StageKey(command.source, command.adapter)
        content = await stager.stage(key)
        cost = stager.cost_of(key)
        answer: dict[str, Any] = {
            "timing": UpdateTiming(fetched_bytes=cost.fetched_bytes, staged_s=round(cost.staged_s, 3))
        }
        if content is not None and self._in_flight.runner.engine.capabilities.weight_digests:
            answer["digest"] = content.digest
            answer["path"] = None if command.source.path is None else str(content.folder)
        return answer

    async def _abort(self, command: Abort) -> dict[str, Any]:
        ids = None if command.request_ids is None else set(command.request_ids)
        found = self._in_flight.links.requests.names_by_id(ids)
        await self._in_flight.abort_and_wait([name for names in found.values() for name in names])
        return {"request_ids": tuple(sorted(found)[: limits.MAX_CHUNKS_PER_FRAME])}

    async def _transfer(self, command: InitWeightTransfer | StartWeightUpdate | UpdateWeightChunk, by: str) -> None:
        if self._registers.is_asleep:
            raise ControlError(ControlCode.NOT_SERVING, "the engine is asleep")
        transfer = self._registers.transfer
        async with self._reconciler.exclusive(halts=isinstance(command, StartWeightUpdate)):
            match command:
                case InitWeightTransfer():
                    await transfer.init(command, by)
                case StartWeightUpdate():
                    await transfer.start(command, by)
                case UpdateWeightChunk():
                    await transfer.add_chunk(command, by)
        # A controller decides about the finish by presence.
        self._lifecycle.request_presence()
