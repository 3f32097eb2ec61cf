"""A passive view of the fleet that sends nothing to workers, for programs that poll every second."""

from collections.abc import Iterable
from typing import NamedTuple

from ...schemas.desired import DesiredState
from ...schemas.presence import WorkerPresence
from ...schemas.request import Lane
from ..control.revisions import StoredState
from ..protocol.telemetry.command_book import CommandLine
from ..queue.streams import QueueDepth, queue_clients
from .call_registry import CallRegistry
from .client import Client, registry_of
from .command_listener import CommandListener

__all__ = ["FleetWatch", "HeardWorker", "watch_fleet"]


class HeardWorker(NamedTuple):
    """A live worker with its latest presence."""

    presence: WorkerPresence
    heard_at: float
    """Time of the latest presence on `time.monotonic()`."""


class FleetWatch:
    """Reads the state that a connected client has of its fleet. Create it with `watch_fleet`.

    Use it from the client's event loop. Unlike `Fleet.state`, it sends nothing to workers: workers publish their
    presence every second.
    """

    def __init__(self, registry: CallRegistry) -> None:
        self._thread = registry.thread
        self._runtime = registry.runtime
        self._subjects = registry.config.subjects
        self._listener = CommandListener(self._runtime.nats, self._subjects, self._runtime.watcher.table)
        self.fleet = self._subjects.fleet

    def __repr__(self) -> str:
        """Return one line with the fleet."""
        return f"<FleetWatch {self.fleet}>"

    @property
    def bad_messages(self) -> int:
        """Number of received commands and acks that could not be decoded or did not come from their author."""
        return self._listener.rejected.so_far

    @property
    def problem(self) -> str | None:
        """Why the client receives no presence at the moment. None if it does."""
        nats = self._runtime.nats
        if nats.lost is not None:
            return str(nats.lost)
        return None if nats.is_connected else "the connection to NATS is down"

    async def workers(self) -> tuple[HeardWorker, ...]:
        """Return the live workers by id, each with its latest presence.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._workers())

    async def _workers(self) -> tuple[HeardWorker, ...]:
        return tuple(HeardWorker(*heard) for heard in self._runtime.watcher.table.heard())

    async def queues(self) -> tuple[tuple[QueueDepth, ...], dict[str, str]]:
        """Return the waiting requests by queue, and by model the reason why a queue does not answer.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.watcher.queues())

    async def clients(self, models: Iterable[str]) -> dict[tuple[str, Lane, str], int]:
        """Count the requests of each client in the queues of these models. The keys are (model, lane, client).

        Raises:
            PermissionDenied: this user may not list them.
            BusBroken: JetStream does not answer.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._clients(tuple(models)))

    async def _clients(self, models: tuple[str, ...]) -> dict[tuple[str, Lane, str], int]:
        return {
            (model, *lane_and_client): count
            for model in models
            for lane_and_client, count in (await queue_clients(self._runtime.nats, self._subjects, model)).items()
        }

    async def listen(self) -> None:
        """Receive the commands and acks of all controllers until `unlisten`.

        Raises:
            PermissionDenied: this user may not receive them.
            BusBroken: the connection to NATS is permanently lost.
            BusClosed: the client was closed.
        """
        await self._thread.run(self._listener.start())

    async def unlisten(self) -> None:
        """Stop receiving commands and acks.

        Raises:
            BusClosed: the client was closed.
        """
        await self._thread.run(self._listener.stop())

    async def commands(self) -> tuple[CommandLine, ...]:
        """Return the last commands received between `listen` and `unlisten`, newest first.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._commands())

    async def _commands(self) -> tuple[CommandLine, ...]:
        return self._listener.lines()

    async def desired(self) -> dict[str, DesiredState]:
        """Return the desired state of the workers of each model.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.controller.store.read_all())

    async def history(self, model: str, after: int = 0) -> tuple[StoredState, ...]:
        """Return the desired states of `model` that the store still has after a sequence number, oldest first.

        Raises:
            BusBroken: JetStream or the connection failed.
            PermissionDenied: this user may not read the history.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.controller.store.signed_history(model, after))


def watch_fleet(client: Client) -> FleetWatch:
    """Return a view of the fleet of a connected client.

    Raises:
        BusClosed: the client is not connected.
    """
    return FleetWatch(registry_of(client))
