"""Reads what is desired of a worker: when something may have changed, and every few seconds."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bus.control.store import DesiredStore
from bus.protocol.desired import effective, target_version, wanted_loras
from schemas.desired import DesiredState, Recorded
from schemas.errors import BusBroken, BusClosed, RemoteProtocolError

__all__ = ["DesiredReader"]

logger = logging.getLogger(__name__)

READ_S = 5.0
"""Between two looks when nothing is heard: for what was missed. It costs a fleet of hundreds next to nothing."""
RETRY_S = 1.0
"""After a look that failed: a server that starts, or has no JetStream for a while."""


class _Command(NamedTuple):
    """One that was recorded."""

    register: str
    epoch: int
    id: str


class DesiredReader:
    """What is desired of one worker, as far as it has read.

    Args:
        on_read: called after each look that brought something.
    """

    def __init__(self, store: DesiredStore, *, model: str, worker: str, on_read: Callable[[], None]) -> None:
        self._store = store
        self._model = model
        self._worker = worker
        self._on_read = on_read
        self._wanted = asyncio.Event()
        self._num_asked = 0
        self._num_needed = 0
        # Heard of since the last read began, which may bring them; no more than the worker has under way.
        self._looked_for: set[_Command] = set()
        self._is_reading = False
        self.effective: Mapping[str, Recorded] = {}
        """What counts for this worker, by register."""
        self.epoch = 0
        """Of the state that was read."""
        self.target_version: int | None = None
        """Of the weights that it should have; None: nothing is recorded about that."""
        self.wanted_loras: frozenset[str] = frozenset()
        """Names of the adapters that any worker of the model should have."""
        self.num_read = 0
        """Calls of `look` that were followed."""
        self.is_fresh = False
        """It was read, and since it last had to be."""
        self.problem: str | None = None
        """Why the last look failed; None: it did not."""

    def __repr__(self) -> str:
        """One line with the epoch."""
        return f"<DesiredReader epoch={self.epoch} fresh={self.is_fresh} problem={self.problem}>"

    def look(self) -> int:
        """Something may have changed; returns what `num_read` is once that was read."""
        self._num_asked += 1
        self._wanted.set()
        return self._num_asked

    def look_for(self, register: str, epoch: int, command_id: str) -> int:
        """`look` for a command that was recorded in `epoch`; does not read again what was read, or is being read.

        Of each recording a worker hears twice, by the writing itself and by the command, and a large fleet reads at
        once.
        """
        command = _Command(register, epoch, command_id)
        if self.is_fresh and self._holds(command):
            return self.num_read
        if not self._is_reading:
            return self.look()
        self._num_asked += 1
        self._looked_for.add(command)
        return self._num_asked

    def _holds(self, command: _Command) -> bool:
        recorded = self.effective.get(command.register)
        return recorded is not None and (recorded.epoch, recorded.command.id) == (command.epoch, command.id)

    def forget(self) -> None:
        """What was read does not count any more: this worker was not there for a while."""
        self.is_fresh = False
        self._num_needed = self.look()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._wanted.clear()
            self._looked_for.clear()
            num_asked = self._num_asked
            wait_s = READ_S
            self._is_reading = True
            try:
                state = await self._store.read(self._model)
            except (BusBroken, BusClosed, RemoteProtocolError) as exc:
                wait_s = RETRY_S
                if self.problem is None:
                    logger.warning("desired.unread model=%s error=%s", self._model, exc)
                self.problem = str(exc)
            else:
                self.problem = None
                self._take(state)
                if not all(map(self._holds, self._looked_for)):
                    self._wanted.set()
                if not self._wanted.is_set():
                    # What was asked for meanwhile is in it.
                    num_asked = self._num_asked
                self.num_read = num_asked
                self.is_fresh = num_asked >= self._num_needed
                self._on_read()
            finally:
                self._is_reading = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()

    def _take(self, state: DesiredState | None) -> None:
        self.effective = {} if state is None else effective(state, self._worker)
        self.epoch = 0 if state is None else state.epoch
        self.target_version = target_version(state, self._worker)
        self.wanted_loras = wanted_loras(state)
