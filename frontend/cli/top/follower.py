"""Follows a fleet for `rollbus top`: hears its workers, and asks NATS what waits for them and what they were told."""

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
"""For NATS, and workers, to answer before there is something to show: a healthy server takes milliseconds."""
READ_EVERY_S: Final = 1.0
"""Workers announce themselves as often."""


@dataclass(frozen=True, slots=True)
class _RecordedFleet:
    """What NATS has of the fleet, as it was last read."""

    queues: tuple[QueueDepth, ...] = ()
    queue_problems: dict[str, str] = field(default_factory=dict)
    desired: dict[str, DesiredState] = field(default_factory=dict)
    problem: str | None = None


class FleetFollower:
    """What is known of a fleet, and its rates. Nothing is sent to workers: they announce themselves every second."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch
        self._rates = FleetRates()
        self._recorded = _RecordedFleet()
        self._has_read = asyncio.Event()
        self._heard_at = time.time()

    async def look(self) -> TopView:
        """Return what is known now, at once.

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
        """Ask NATS again and again, until cancelled."""
        while True:
            try:
                queues, problems = await self._watch.queues()
                self._recorded = replace(self._recorded, queues=queues, queue_problems=problems, problem=None)
                self._recorded = replace(self._recorded, desired=await self._watch.desired())
            except RollbusError as exc:
                # What workers say of themselves counts all the same.
                self._recorded = replace(self._recorded, problem=f"queues, or what was told, cannot be read: {exc}")
            self._has_read.set()
            await asyncio.sleep(READ_EVERY_S)

    async def wait_until_read(self) -> None:
        """Wait until NATS has answered once, and half a second at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self._has_read.wait()


@asynccontextmanager
async def following(watch: FleetWatch) -> AsyncIterator[FleetFollower]:
    """Follow a fleet for a block."""
    follower = FleetFollower(watch)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(follower.read(), name="top.read")
        await follower.wait_until_read()
        yield follower
        reading.cancel()
