"""Follows a fleet for `rollbus top`: receives presence, and reads the queues and desired states from NATS."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from ....bus import FleetState, QueueDepth
from ....bus.client.fleet_watch import FleetWatch
from ....bus.protocol.telemetry.fleet_rates import FleetRates
from ....schemas.desired import DesiredState
from ....schemas.errors import RollbusError
from .screen import TopView

__all__ = ["FleetFollower", "following"]

FIRST_READ_S: Final = 0.5
"""Seconds for NATS to answer before the first display. A healthy server answers in milliseconds."""
READ_EVERY_S: Final = 1.0
"""Seconds between two reads. Workers publish presence at the same interval."""


@dataclass(frozen=True, slots=True)
class _RecordedFleet:
    """The last read of the fleet's state in NATS."""

    queues: tuple[QueueDepth, ...] = ()
    queue_problems: dict[str, str] = field(default_factory=dict)
    desired: dict[str, DesiredState] = field(default_factory=dict)
    problem: str | None = None


class FleetFollower:
    """The state of a fleet and its rates. It sends nothing to workers, which publish presence every second."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch
        self._rates = FleetRates()
        self._recorded = _RecordedFleet()
        self._has_read = asyncio.Event()
        self._heard_at = time.time()

    async def refresh(self) -> TopView:
        """Return the known state immediately.

        Raises:
            BusClosed: the client was closed.
        """
        heard = await self._watch.workers()
        self._rates.update(heard)
        recorded, problem = self._recorded, self._watch.problem
        if problem is None:
            self._heard_at = time.time()
            problem = recorded.problem
        else:
            problem = f"{problem}; this is what was known {time.time() - self._heard_at:.0f} s ago"
        state = FleetState(
            fleet=self._watch.fleet,
            workers=tuple(presence for presence, _ in heard),
            queues=recorded.queues,
            queue_problems=recorded.queue_problems,
            desired=recorded.desired,
        )
        return TopView(state, self._rates, time.time(), problem)

    async def read(self) -> None:
        """Read the state from NATS periodically, until cancelled."""
        while True:
            try:
                queues, problems = await self._watch.queues()
                self._recorded = replace(self._recorded, queues=queues, queue_problems=problems, problem=None)
                self._recorded = replace(self._recorded, desired=await self._watch.desired())
            except RollbusError as exc:
                # The presence of the workers is still valid.
                self._recorded = replace(self._recorded, problem=f"cannot read the queues or the desired state: {exc}")
            self._has_read.set()
            await asyncio.sleep(READ_EVERY_S)

    async def wait_until_read(self) -> None:
        """Wait until NATS has answered once, at most half a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self._has_read.wait()


@asynccontextmanager
async def following(watch: FleetWatch) -> AsyncIterator[FleetFollower]:
    """Follow a fleet while the block lasts."""
    follower = FleetFollower(watch)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(follower.read(), name="top.read")
        await follower.wait_until_read()
        yield follower
        reading.cancel()
