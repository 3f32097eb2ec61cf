"""Reads the desired state of a worker's model: when it may have changed, and every few seconds."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...bus.control.store import DesiredStore
from ...bus.protocol.fleet.desired import desired_loras, effective, target_version
from ...bus.protocol.fleet.read_order import ReadOrder, ReadVerdict
from ...schemas.desired import DesiredState, Recorded
from ...schemas.errors import BusBroken, BusClosed, RemoteProtocolError

__all__ = ["DesiredReader"]

logger = logging.getLogger(__name__)

READ_S = 5.0
"""Seconds between two reads without a request, for missed messages, at most: twice in a lease, or a read that is late
would count as missing. A fleet of hundreds hardly notices them."""
RETRY_S = 1.0
"""Seconds after a failed read: the server may be starting, or have no JetStream for a while."""


class _ReadCommand(NamedTuple):
    """A recorded command."""

    register: str
    epoch: int
    id: str


class DesiredReader:
    """The desired state of one worker, as it was read last.

    Args:
        max_age_s: how long a read is good for: one lease, after which controllers go on without this worker, and what
            is desired may have changed.
    """

    def __init__(self, store: DesiredStore, *, model: str, worker: str, max_age_s: float) -> None:
        self._store = store
        self._model = model
        self._worker = worker
        self._max_age_s = max_age_s
        self.on_read: Callable[[], None] = lambda: None
        """Called after each read that succeeded and was not stale."""
        self._is_requested = asyncio.Event()
        self._num_requested = 0
        self._num_needed = 0
        # Requested since the last read began, which may contain them; no more than the worker has under way.
        self._awaited_commands: set[_ReadCommand] = set()
        self._is_reading = False
        self._order = ReadOrder()
        self.is_lost = False
        self._lost_at_read = -1
        """What the last read brought is another desired state than the one before: that was lost."""
        self.effective: Mapping[str, Recorded] = {}
        """The recorded command of each register of this worker."""
        self.epoch = 0
        """Epoch of the state that was read."""
        self.target_version: int | None = None
        """Desired weight version; None: none is recorded."""
        self.desired_loras: frozenset[str] = frozenset()
        """Names of the adapters that any worker of the model should have."""
        self.num_read = 0
        """Calls of `request_read` that a read has followed."""
        self._is_valid = False
        self._known_at = -math.inf
        self.problem: str | None = None
        """Why the last read failed; None: it did not."""

    def __repr__(self) -> str:
        """One line with the epoch."""
        return f"<DesiredReader epoch={self.epoch} fresh={self.is_fresh} problem={self.problem}>"

    @property
    def is_fresh(self) -> bool:
        """It was read after the start and after the last `invalidate`, and not too long ago."""
        return self._is_valid and time.monotonic() <= self._known_at + self._max_age_s

    @property
    def refused(self) -> int:
        """Number of stored states that did not count, because no author that may write them had signed them."""
        return self._store.refused

    def request_read(self) -> int:
        """Have `run` read soon; return the `num_read` of the read that follows."""
        self._num_requested += 1
        self._is_requested.set()
        return self._num_requested

    def request_command(self, register: str, epoch: int, command_id: str) -> int:
        """Request a read for a command that was recorded in `epoch`, unless it was read or is being read.

        Each recording reaches a worker twice, by the KV bucket and by the command, and a large fleet reads at once.
        """
        command = _ReadCommand(register, epoch, command_id)
        if self.is_fresh and self._holds(command):
            return self.num_read
        if not self._is_reading:
            return self.request_read()
        self._num_requested += 1
        self._awaited_commands.add(command)
        return self._num_requested

    def has_lost(self, register: str, epoch: int, command_id: str, needs_read: int) -> bool:
        """Return True if a read since the command came brought another state than before, which does not hold it.

        Args:
            register: of the command.
            epoch: in which it was recorded.
            command_id: its id.
            needs_read: as `request_command` returned it.
        """
        return needs_read <= self._lost_at_read and not self._holds(_ReadCommand(register, epoch, command_id))

    def _holds(self, command: _ReadCommand) -> bool:
        recorded = self.effective.get(command.register)
        return recorded is not None and (recorded.epoch, recorded.command.id) == (command.epoch, command.id)

    def invalidate(self) -> None:
        """Discard what was read, because this worker was fenced, and request a read."""
        self._is_valid = False
        self._num_needed = self.request_read()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._is_requested.clear()
            self._awaited_commands.clear()
            num_asked = self._num_requested
            wait_s = min(READ_S, self._max_age_s / 2)
            self._is_reading = True
            try:
                await self._read()
            except (BusBroken, BusClosed, RemoteProtocolError) as exc:
                wait_s = RETRY_S
                if self.problem is None:
                    logger.warning("desired.unread model=%s error=%s", self._model, exc)
                self.problem = str(exc)
            else:
                self.problem = None
                if not all(map(self._holds, self._awaited_commands)):
                    self._is_requested.set()
                if not self._is_requested.is_set():
                    # The state that was read contains what was requested meanwhile.
                    num_asked = self._num_requested
                self.num_read = num_asked
                if self.is_lost:
                    self._lost_at_read = num_asked
                self._is_valid = num_asked >= self._num_needed
                self.on_read()
            finally:
                self._is_reading = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_requested.wait()

    async def _read(self) -> None:
        asked_at = time.monotonic()
        confirmed_s = await self._store.confirmed_s()
        if confirmed_s > self._max_age_s:
            raise BusBroken(
                f"the server that answers for the desired state of {self._model!r} hears from too few others of its "
                "cluster: they may have another one"
            )
        try:
            state = await self._store.read(self._model)
        except RemoteProtocolError:
            # There is none that could be followed, so none that is missed.
            self._known_at = asked_at - confirmed_s
            raise
        self._update(state)
        self._known_at = asked_at - confirmed_s

    def _update(self, state: DesiredState | None) -> None:
        verdict = self._order.judge(state, time.monotonic())
        if verdict is ReadVerdict.STALE:
            found = "none" if state is None else f"one of epoch {state.epoch}"
            raise BusBroken(
                f"the server has {found} as the desired state of {self._model!r}, where one of epoch {self.epoch} was "
                "read before: it is behind the others of its cluster, or its store was lost"
            )
        self.is_lost = verdict is ReadVerdict.LOST
        self.effective = {} if state is None else effective(state, self._worker)
        self.epoch = 0 if state is None else state.epoch
        self.target_version = target_version(state, self._worker)
        self.desired_loras = desired_loras(state)
