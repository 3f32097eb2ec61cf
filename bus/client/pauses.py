"""Logs once for each pause that requests wait because the fleet is paused. Runs on the bus thread."""

import asyncio
import logging
import time
from datetime import datetime
from typing import Final

from ...schemas.errors import RollbusError
from ...schemas.presence import WorkerState
from ..control.store import DesiredStore
from ..protocol.fleet.desired import effective
from ..protocol.fleet.fleet_snapshot import accepts_whole_requests
from .exchange import AttemptCoordinator
from .presence_watcher import PresenceWatcher

__all__ = ["PauseWarnings"]

logger = logging.getLogger(__name__)

WARN_AFTER_S: Final = 10.0
"""Seconds. A weight update pauses a fleet for a few seconds. A longer pause may have been forgotten."""
ROUND_S: Final = 0.5
"""Seconds between two checks for waiting requests."""


class PauseWarnings:
    """Tracks which models are paused while this client has open requests, and which pauses were logged."""

    def __init__(self, watcher: PresenceWatcher, coordinator: AttemptCoordinator, store: DesiredStore) -> None:
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = store
        # Models with a paused worker and without a serving worker, as of the last change of the fleet.
        self._paused: set[str] = set()
        # Time since which each of them is paused, and the seconds of the pauses that have ended, by model.
        self._paused_since: dict[str, float] = {}
        self._paused_s: dict[str, float] = {}
        # Time since which requests wait for the end of the pause, by model.
        self._waiting: dict[str, float] = {}
        # Models whose present pause was logged.
        self._told: set[str] = set()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<PauseWarnings waiting={len(self._waiting)} told={len(self._told)}>"

    def update_paused(self) -> None:
        """Find the paused models, and remove pauses that have ended.

        Call this when a worker joins, leaves or changes its state.
        """
        able = [worker for worker in self._watcher.snapshot.workers if accepts_whole_requests(worker)]
        serving = {worker.model for worker in able if worker.state is WorkerState.SERVING}
        self._paused = {worker.model for worker in able if worker.state is WorkerState.PAUSED} - serving
        now, since = time.monotonic(), self._paused_since
        for model in since.keys() - self._paused:
            self._paused_s[model] = self._paused_s.get(model, 0.0) + now - since[model]
        self._paused_since = {model: since.get(model, now) for model in self._paused}
        self._told &= self._paused
        self._waiting = {model: since for model, since in self._waiting.items() if model in self._paused}

    def paused_s(self) -> dict[str, float]:
        """Return for how many seconds each model has been paused so far."""
        now, since = time.monotonic(), self._paused_since
        models = self._paused_s.keys() | since.keys()
        return {model: self._paused_s.get(model, 0.0) + now - since.get(model, now) for model in models}

    async def mute_present(self) -> None:
        """Log nothing for the present pauses."""
        self._told |= self._paused

    async def run(self) -> None:
        """Check for waiting requests until cancelled."""
        while True:
            await asyncio.sleep(ROUND_S)
            now, paused = time.monotonic(), self._paused - self._told
            if not paused:
                continue
            open_models = {child.open_call.model for child in self._coordinator.open_children(lambda _: True)}
            self._waiting = {model: self._waiting.get(model, now) for model in paused & open_models}
            for model in [model for model, since in self._waiting.items() if now - since >= WARN_AFTER_S]:
                self._told.add(model)
                since = await self.paused_since(model)
                when = "" if since is None else f" since {since.astimezone():%Y-%m-%d %H:%M:%S}"
                reason = f"the fleet is paused{when}; to resume it: rollbus resume"
                logger.warning("client.pause_detected model=%s reason=%s", model, reason)

    async def paused_since(self, model: str) -> datetime | None:
        """Return the time of the last command that pauses a worker of `model`. None if unknown or if none is paused."""
        try:
            state = await self._store.read(model)
            if state is None:
                return None
            registers = [effective(state, worker.worker) for worker in self._watcher.table.workers(model)]
            epochs = {found["pause"].epoch for found in registers if "pause" in found}
            times = [await self._store.recorded_at(model, epoch) for epoch in epochs]
        except RollbusError:
            # The log line is useful without the time. A user may also lack the permission to read the history.
            return None
        return max((time for time in times if time is not None), default=None)
