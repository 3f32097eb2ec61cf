"""Moves requests away from workers that offered to run them and send no tokens. Runs on the bus thread."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from ...schemas.control import Resume, Wake
from ...schemas.desired import DesiredState
from ...schemas.errors import ErrorCode, RollbusError
from ...schemas.presence import WorkerPresence, WorkerState
from ..control.store import DesiredStore
from ..nats.connection import Connection
from ..protocol.attempt import events as on
from ..protocol.attempt.silence import BUSY_FACTOR, SILENT_S, SilenceWatch
from ..protocol.fleet.desired import effective
from .children import ChildRequest
from .exchange import AttemptCoordinator
from .presence_watcher import PresenceWatcher

__all__ = ["SilenceChecks"]

logger = logging.getLogger(__name__)

SILENCE_ROUND_S: Final = 1.0
"""Seconds between two checks."""
READ_S: Final = 5.0
"""Seconds between two reads of a model's desired state while a worker with requests of this client does not serve."""
MAX_BEHIND_S: Final = 600.0
"""Seconds for which a worker may apply a recorded command, or receive weights before the next one. After that, its
silence counts, also if it says meanwhile that it serves."""


class SilenceChecks:
    """Checks the open requests of one client."""

    def __init__(self, nats: Connection, watcher: PresenceWatcher, coordinator: AttemptCoordinator) -> None:
        self._nats = nats
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = DesiredStore(nats, watcher.subjects)
        # The models of the workers that do not serve now, with the time of the last read.
        self._states: dict[str, tuple[float, DesiredState | None]] = {}
        # By worker with open requests: the recorded epoch, and since when the worker says that it is busy with weights.
        self._behind_since: dict[str, tuple[int, float]] = {}
        self.watch = SilenceWatch()
        coordinator.silent = self.watch.avoided

    def __repr__(self) -> str:
        """Return one line with the silent workers."""
        return f"<SilenceChecks {self.watch}>"

    def named(self, workers: Sequence[WorkerPresence]) -> tuple[WorkerPresence, ...]:
        """Return the presence of these workers, where the last error of silent workers is their silence."""
        error = "it offered to run requests of this client and sent no tokens of them"
        avoided = self.watch.avoided
        return tuple(replace(one, last_error=error) if one.worker in avoided else one for one in workers)

    async def run(self) -> None:
        """Check until cancelled."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(SILENCE_ROUND_S)
            offered = self._coordinator.open_children(lambda child: child.worker is not None)
            suspended = await self._suspended({child.worker or "" for child in offered})
            now = time.monotonic()
            elapsed_s, checked_at = now - checked_at, now
            if not self._nats.is_connected or elapsed_s > 2 * SILENCE_ROUND_S + READ_S:
                # This process did not read, so it cannot judge.
                suspended = {child.worker or "" for child in offered}
            waiting_since = now - BUSY_FACTOR * SILENT_S
            live = [
                child
                for child in offered
                # A worker without a free slot may let followers of a group wait, behind those of other clients.
                if child.is_open and child.worker is not None and (child.has_begun or child.heard_at < waiting_since)
            ]
            for worker in list(self.watch.avoided):
                if (presence := self._watcher.table.get(worker)) is not None:
                    self.watch.forget(worker, presence.incarnation)
            self._move(self.watch.check(live, suspended, elapsed_s, now), now)

    def _move(self, children: Sequence[ChildRequest], now: float) -> None:
        for worker, count in Counter(child.worker or "" for child in children).items():
            logger.warning("worker.silence_detected worker=%s requests=%s", worker, count)
        for child in children:
            silent_s = now - child.heard_at
            message = f"worker {child.worker} offered to run the request and sent no token of it for {silent_s:.0f} s"
            child.avoids_queue = True
            self._coordinator.send(child, on.Lost(child.open_call.failure(ErrorCode.WORKER_LOST, message)))

    async def _suspended(self, workers: set[str]) -> set[str]:
        """Return the workers that the recorded state keeps from generating, not those that only say so."""
        found, models = set(), set()
        self._behind_since = {worker: since for worker, since in self._behind_since.items() if worker in workers}
        for worker in workers:
            presence = self._watcher.table.get(worker)
            if presence is None or presence.state is WorkerState.SERVING:
                continue
            models.add(presence.model)
            try:
                state = await self._state(presence.model)
            except RollbusError as exc:
                logger.debug("silence.check_failed worker=%s error=%s", worker, exc)
                found.add(worker)
                continue
            if state is not None and is_stopped(state, presence):
                found.add(worker)
            elif presence.transfer is not None or (state is not None and presence.epoch < state.epoch):
                now, recorded = time.monotonic(), 0 if state is None else state.epoch
                epoch, since = self._behind_since.get(worker, (recorded, now))
                if epoch != recorded:
                    since = now
                self._behind_since[worker] = recorded, since
                if now - since < MAX_BEHIND_S:
                    found.add(worker)
        # Workers choose the names of their models, and may change them.
        self._states = {model: read for model, read in self._states.items() if model in models}
        return found

    async def _state(self, model: str) -> DesiredState | None:
        read_at, state = self._states.get(model, (-READ_S, None))
        if time.monotonic() - read_at >= READ_S:
            state = await self._store.read(model)
            self._states[model] = time.monotonic(), state
        return state


def is_stopped(state: DesiredState, presence: WorkerPresence) -> bool:
    """Return True if a recorded command pauses or drains this worker, or puts it to sleep."""
    registers = effective(state, presence.worker)
    return any(
        register in registers and not isinstance(registers[register].command, Resume | Wake)
        for register in ("pause", "sleep")
    )
