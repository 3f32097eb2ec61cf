"""Publishes presence of workers whose processes cannot yet: they start, or wait for their restart.

Requests wait for a worker that is announced. Its process has the announced incarnation and publishes presence as soon
as it is connected. Then the announcement ends.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...bus.nats.connection import connected, publish
from ...bus.nats.server import Server
from ...bus.subjects import Subjects
from ...schemas.errors import BusBroken
from ...schemas.messages import encode_json
from ...schemas.presence import WorkerPresence, WorkerState

__all__ = ["StartAnnouncer", "is_announcement"]

logger = logging.getLogger(__name__)

ANNOUNCE_EVERY_S: Final = 0.2
"""Seconds between two announcements. A client waits half a second for the workers before it gives up a request."""
LEASE_S: Final = 5.0
"""Seconds for which an announcement is valid, as for the presence of workers."""
GIVE_UP_S: Final = 2.0
"""Seconds for the last presence of a worker that is not started again. The server may have ended."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of a worker's process."""

    incarnation: str
    why: str
    at: float
    """Time at which the process is started."""


class StartAnnouncer:
    """The workers of one command that start.

    Args:
        tasks: group in which the announcements run.
        server_of: returns the server with the login of a worker, because only a worker may publish its presence.
        model: served name of the model of all workers.
        start_timeout_s: seconds for which requests wait for a process that starts.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        server_of: Callable[[str], Server],
        *,
        fleet: str,
        model: str,
        start_timeout_s: float,
    ) -> None:
        self._tasks = tasks
        self._server_of = server_of
        self._subjects = Subjects(fleet)
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._starts: dict[str, _Start] = {}
        self._announcing: dict[str, asyncio.Task[None]] = {}

    def incarnation(self, worker: str) -> str:
        """Return the first incarnation of the process that is started now, and announce it."""
        if worker not in self._starts:
            self.begin(worker)
        return self._starts[worker].incarnation

    def begin(self, worker: str, why: str = "", delay_s: float = 0.0) -> None:
        """Announce that a process of the worker is started in `delay_s` seconds, and why."""
        self.end(worker)
        start = self._starts[worker] = _Start(uuid.uuid4().hex[:8], why, time.monotonic() + delay_s)
        self._announcing[worker] = self._tasks.create_task(self._announce(worker, start), name=f"announce {worker}")

    def on_presence(self, workers: Sequence[WorkerPresence]) -> None:
        """End the announcements of `workers` whose processes publish presence."""
        for presence in workers:
            start = self._starts.get(presence.worker)
            if start is not None and start.incarnation == presence.incarnation and not is_announcement(presence):
                self.end(presence.worker)

    def end(self, worker: str) -> None:
        """Announce the worker no longer."""
        self._starts.pop(worker, None)
        if (task := self._announcing.pop(worker, None)) is not None:
            task.cancel()

    def end_all(self) -> None:
        """Announce no worker any longer."""
        for worker in list(self._starts):
            self.end(worker)

    async def give_up(self, worker: str, why: str) -> None:
        """Publish that the worker is not started again, so that requests for it fail."""
        self.end(worker)
        incarnation = uuid.uuid4().hex[:8]
        try:
            async with asyncio.timeout(GIVE_UP_S), connected(self._server_of(worker), name="rollbus up") as nats:
                # The first of the two shows clients that the earlier incarnation died, and may have died of a request.
                for state in (WorkerState.STARTING, WorkerState.FAILED):
                    presence = self._presence(worker, incarnation, state, 0.0, why)
                    await publish(nats, self._subjects.presence(worker), encode_json(presence))
                await nats.flush()
        except (BusBroken, TimeoutError) as exc:
            logger.warning("worker.announce_failed worker=%s error=%s", worker, exc)

    async def _announce(self, worker: str, start: _Start) -> None:
        try:
            async with connected(self._server_of(worker), name="rollbus up") as nats:
                while True:
                    left_s = start.at - time.monotonic()
                    why = f"{start.why} in {left_s:.0f} s" if left_s > 0 else start.why or None
                    awaited_s = max(self._start_timeout_s + left_s, 0.0)
                    presence = self._presence(worker, start.incarnation, WorkerState.STARTING, awaited_s, why)
                    await publish(nats, self._subjects.presence(worker), encode_json(presence))
                    await asyncio.sleep(ANNOUNCE_EVERY_S)
        except BusBroken as exc:
            logger.warning("worker.announce_failed worker=%s error=%s", worker, exc)

    def _presence(
        self, worker: str, incarnation: str, state: WorkerState, start_left_s: float, last_error: str | None
    ) -> WorkerPresence:
        return WorkerPresence(
            worker=worker,
            incarnation=incarnation,
            model=self._model,
            state=state,
            weight_version=0,
            in_flight=0,
            free_slots=0,
            uptime_s=0.0,
            lease_s=LEASE_S,
            start_left_s=start_left_s,
            last_error=last_error,
        )


def is_announcement(presence: WorkerPresence) -> bool:
    """Return True if not the worker's own process has published this presence: the process adds its id."""
    return presence.pid is None
