"""Says once in the log that requests wait because their fleet is paused. On the bus thread."""

import asyncio
import logging
import time
from datetime import datetime
from typing import Final

from ...schemas.errors import RollbusError
from ...schemas.presence import WorkerState
from ..control.store import DesiredStore
from ..protocol.fleet.desired import effective
from ..protocol.fleet.presence_table import accepts_whole_requests
from .exchange import AttemptCoordinator
from .presence_watcher import PresenceWatcher

__all__ = ["PauseWarnings"]

logger = logging.getLogger(__name__)

WARN_AFTER_S: Final = 10.0
"""Updates of weights pause a fleet for some seconds; a longer wait is one that somebody may have forgotten."""
ROUND_S: Final = 0.5
"""How often what waits is looked at."""


class PauseWarnings:
    """Which models are paused while requests of this client are open, and for which of these pauses that was said."""

    def __init__(self, watcher: PresenceWatcher, coordinator: AttemptCoordinator, store: DesiredStore) -> None:
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = store
        # Models that have paused workers, and none that takes requests: as of the last change of the fleet.
        self._paused: set[str] = set()
        # By model: since when something waits for the end of its pause.
        self._waiting: dict[str, float] = {}
        # Models whose present pause was told.
        self._told: set[str] = set()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<PauseWarnings waiting={len(self._waiting)} told={len(self._told)}>"

    def update_paused(self) -> None:
        """Find which models are paused, and forget the pauses that have ended.

        Called when a worker comes, goes or changes its state.
        """
        able = [worker for worker in self._watcher.snapshot.workers if accepts_whole_requests(worker)]
        serving = {worker.model for worker in able if worker.state is WorkerState.SERVING}
        self._paused = {worker.model for worker in able if worker.state is WorkerState.PAUSED} - serving
        self._told &= self._paused
        self._waiting = {model: since for model, since in self._waiting.items() if model in self._paused}

    async def mute_present(self) -> None:
        """Log nothing of the pauses of now."""
        self._told |= self._paused

    async def run(self) -> None:
        """Look for requests that wait, until cancelled."""
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
                logger.warning("client.waiting model=%s reason=%s", model, f"the fleet is paused{when}; rollbus resume")

    async def paused_since(self, model: str) -> datetime | None:
        """Return when the last of a model's workers was told to pause; None if that is not known, or none is."""
        try:
            state = await self._store.read(model)
            if state is None:
                return None
            registers = [effective(state, worker.worker) for worker in self._watcher.table.workers(model)]
            epochs = {found["pause"].epoch for found in registers if "pause" in found}
            times = [await self._store.recorded_at(model, epoch) for epoch in epochs]
        except RollbusError:
            # The line is true without it; a user may also lack the permission.
            return None
        return max((time for time in times if time is not None), default=None)
