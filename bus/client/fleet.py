"""The fleet as a trainer sees it: who lives, what they serve, what waits for them."""

from typing import Any

import msgspec

from bus.client.fleet_watch import FleetWatch
from bus.client.loop_thread import LoopThread
from bus.queue.streams import QueueDepth
from schemas.presence import WorkerPresence

__all__ = ["Fleet", "FleetState"]


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    fleet: str
    workers: tuple[WorkerPresence, ...]
    """Live workers by id; empty when there are none."""
    queues: tuple[QueueDepth, ...] = ()
    """How much waits for them, by model and lane; empty where the server has no queue for their models."""


class Fleet:
    """The workers of one fleet. Got from a client that is connected; use it from the client's event loop.

    Args:
        name: of the fleet.
        thread: where `watch` lives.
    """

    def __init__(self, name: str, thread: LoopThread[Any], watch: FleetWatch) -> None:
        self._name = name
        self._thread = thread
        self._watch = watch

    def __repr__(self) -> str:
        """One line with each worker and its state."""
        workers = (f"{worker.worker}:{worker.state}" for worker in self._watch.snapshot.workers)
        return f"<Fleet {self._name} {' '.join(workers) or 'empty'}>"

    @property
    def bad_messages(self) -> int:
        """Announcements that did not decode."""
        return self._watch.bad_messages

    async def state(self) -> FleetState:
        """Ask all workers for their state and return what was heard within half a second.

        Raises:
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        workers, queues = await self._thread.run(self._watch.announced())
        return FleetState(fleet=self._name, workers=workers, queues=queues)

    async def wait_for_workers(self, count: int = 1, *, model: str | None = None, timeout_s: float = 300.0) -> None:
        """Wait until at least `count` workers serve `model` (or any).

        Raises:
            NoWorkers: fewer did within `timeout_s` seconds; the message says what they were doing.
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        await self._thread.run(self._watch.wait_for_workers(count, model, timeout_s))
