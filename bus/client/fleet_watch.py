"""The fleet as a client hears it, without asking its workers: for programs that look every second."""

from typing import NamedTuple

from ...schemas.desired import DesiredState
from ...schemas.errors import RollbusError
from ...schemas.presence import WorkerPresence
from ..queue.streams import QueueDepth
from .call_registry import CallRegistry
from .client import Client, registry_of

__all__ = ["FleetWatch", "HeardWorker", "watch_fleet"]


class HeardWorker(NamedTuple):
    """A live worker as it was last heard."""

    presence: WorkerPresence
    heard_at: float
    """On `time.monotonic()`."""


class FleetWatch:
    """Reads what a connected client knows of its fleet. Made by `watch_fleet`; use it from the client's event loop.

    Unlike `Fleet.state` it sends nothing to workers: they announce themselves every second anyway.
    """

    def __init__(self, registry: CallRegistry) -> None:
        self._thread = registry.thread
        self._runtime = registry.runtime
        self.fleet = registry.config.subjects.fleet

    def __repr__(self) -> str:
        """One line with the fleet."""
        return f"<FleetWatch {self.fleet}>"

    @property
    def problem(self) -> str | None:
        """Why workers cannot be heard now; None: they can."""
        nats = self._runtime.nats
        if nats.lost is not None:
            return str(nats.lost)
        return None if nats.is_connected else "the connection to NATS is down"

    async def workers(self) -> tuple[HeardWorker, ...]:
        """Return the live workers by id, each with its latest announcement.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._workers())

    async def _workers(self) -> tuple[HeardWorker, ...]:
        return tuple(HeardWorker(*heard) for heard in self._runtime.watcher.table.heard())

    async def queues(self) -> tuple[tuple[QueueDepth, ...], dict[str, str]]:
        """Return how much waits for the workers, and by model why a queue does not answer.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.watcher.queues())

    async def desired(self) -> dict[str, DesiredState]:
        """Return what the workers of each model should be doing.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.controller.store.read_all())

    async def recorded_at(self, model: str, epoch: int) -> float | None:
        """Return the Unix time at which the command of `epoch` was recorded; None if that is not known any more.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._recorded_at(model, epoch))

    async def _recorded_at(self, model: str, epoch: int) -> float | None:
        try:
            found = await self._runtime.controller.store.recorded_at(model, epoch)
        except RollbusError:
            # A user may lack the permission to read the history.
            return None
        return None if found is None else found.timestamp()


def watch_fleet(client: Client) -> FleetWatch:
    """Return what reads the fleet of a connected client.

    Raises:
        BusClosed: the client is not connected.
    """
    return FleetWatch(registry_of(client))
