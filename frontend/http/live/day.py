"""The last day of the fleet, for viewers: commands from the store of desired states, and restarts from presence."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final

from ....bus.client.fleet_watch import FleetWatch, HeardWorker
from ....bus.protocol.telemetry.day_log import DayLog, WorkerDay, command_event
from ....schemas.desired import DesiredState
from ....schemas.errors import RollbusError
from .events import DaySnapshot

__all__ = ["FleetDay"]

logger = logging.getLogger(__name__)

MAX_MODELS: Final = 256
"""Models whose commands are read. Workers choose the names of models."""


class FleetDay:
    """Collects the events of the last day."""

    def __init__(self) -> None:
        self._workers = WorkerDay(time.time())
        self._commands = DayLog()
        self._problem: str | None = None
        # By model: the bucket and the epoch for which the commands were read. Workers may announce any epoch.
        self._read: dict[str, tuple[str, int]] = {}
        # By model: sequence number and epoch of the last state that was read.
        self._last: dict[str, tuple[int, int]] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<FleetDay {self._workers!r} commands={self._commands!r}>"

    def update_workers(self, workers: Iterable[HeardWorker]) -> None:
        """Compare the live workers with those of the last update."""
        now, offset = time.time(), time.time() - time.monotonic()
        self._workers.update(((presence, heard_at + offset) for presence, heard_at in workers), now)

    async def read_announced(self, watch: FleetWatch, workers: Iterable[HeardWorker]) -> None:
        """Read the new commands of the models whose workers announce an epoch that was not read.

        The store keeps 64 commands of a model. A later reader would miss those of a fleet that is updated often.
        """
        epochs: dict[str, int] = {}
        for worker, _ in workers:
            epochs[worker.model] = max(epochs.get(worker.model, 0), worker.epoch)
        await self._read_all(watch, {model: (self._bucket(model), epoch) for model, epoch in epochs.items()})

    async def read(self, watch: FleetWatch, desired: Mapping[str, DesiredState]) -> None:
        """Read the new commands of all models."""
        await self._read_all(watch, {model: (state.bucket, state.epoch) for model, state in desired.items()})

    def _bucket(self, model: str) -> str:
        return self._read[model][0] if model in self._read else ""

    async def _read_all(self, watch: FleetWatch, wanted: Mapping[str, tuple[str, int]]) -> None:
        problem = None
        for model, until in wanted.items():
            if self._read.get(model) == until or (model not in self._read and len(self._read) >= MAX_MODELS):
                continue
            try:
                await self._read_model(watch, model, until)
            except RollbusError as error:
                problem = f"cannot read the recorded commands of {model}: {error}"
        if problem not in (None, self._problem):
            logger.warning("live.day_read_failed problem=%s", problem)
        self._problem = problem

    async def _read_model(self, watch: FleetWatch, model: str, until: tuple[str, int]) -> None:
        # Sequence numbers begin again in a new bucket.
        after, epoch = self._last.get(model, (0, 0)) if self._bucket(model) in ("", until[0]) else (0, 0)
        found = await watch.history(model, after)
        if after == 0 and found and found[0].state.epoch > 1:
            self._commands.since = max(self._commands.since, found[0].at)
        events = []
        for sequence, at, state in found:
            # A state that was signed again has the epoch of the state before it.
            if state.epoch > epoch and (event := command_event(state, at)) is not None:
                events.append(event)
            self._last[model], epoch = (sequence, state.epoch), state.epoch
        self._read[model] = until
        self._commands.add(events, time.time())

    def snapshot(self) -> DaySnapshot:
        """Return the events of the last day."""
        return DaySnapshot(
            commands=self._commands.events,
            commands_since=round(self._commands.since, 3),
            workers=self._workers.log.events,
            workers_since=round(self._workers.log.since, 3),
            problem=self._problem,
        )
