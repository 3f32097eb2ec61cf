"""Watches the presence of the workers of a local fleet, from before their start until after their end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from nats.aio.msg import Msg

from ...bus.client.presence_watcher import PresenceWatcher
from ...bus.nats.connection import connected, subscribe
from ...bus.nats.server import Server
from ...bus.subjects import Subjects
from ...schemas.presence import WorkerPresence, WorkerState
from .exits import CommandFailed, ExitCode

__all__ = ["LocalFleetWatch", "watch_fleet"]

EXPIRE_EVERY_S: Final = 1.0
"""Seconds between two checks for expired leases. Workers publish presence at the same interval."""


class LocalFleetWatch:
    """The workers that publish presence.

    Args:
        changed: event that `watcher` sets when a worker appears, disappears or changes its state.
    """

    def __init__(self, watcher: PresenceWatcher, changed: asyncio.Event) -> None:
        self._watcher = watcher
        self._changed = changed

    async def wait_until_serving(self, workers: Sequence[str], timeout_s: float) -> None:
        """Wait until all of `workers` serve.

        Raises:
            CommandFailed: some of them do not serve after `timeout_s` seconds. The message has the states of workers
                that do not serve.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_serving(workers) < len(workers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise CommandFailed(
                f"{self._num_serving(workers)} of {len(workers)} workers serve after {timeout_s:g} s"
                f"{self._watcher.snapshot.describe_others(None)}",
                ExitCode.TIMEOUT,
            ) from exc

    def _num_serving(self, workers: Sequence[str]) -> int:
        live = self._watcher.snapshot.workers
        return sum(worker.state is WorkerState.SERVING and worker.worker in workers for worker in live)


@asynccontextmanager
async def watch_fleet(
    server: Server, fleet: str, on_presence: Callable[[Sequence[WorkerPresence]], None]
) -> AsyncIterator[LocalFleetWatch]:
    """Watch the presence of a fleet's workers while the body runs.

    The watcher is not a client: it publishes no presence, so workers do not know of it.

    Args:
        on_presence: called with the live workers at each presence of a worker.

    Raises:
        BusBroken: no NATS server answers.
    """
    changed = asyncio.Event()

    async def receive(message: Msg) -> None:
        await watcher.receive(message)
        on_presence(watcher.table.workers())

    async with connected(server, name="rollbus up") as nats:
        subjects = Subjects(fleet)
        watcher = PresenceWatcher(nats, subjects, lambda _: None, changed.set)
        await subscribe(nats, subjects.presences, receive)
        async with asyncio.TaskGroup() as tasks:
            expiring = tasks.create_task(_expire(watcher), name="expire leases")
            yield LocalFleetWatch(watcher, changed)
            expiring.cancel()


async def _expire(watcher: PresenceWatcher) -> None:
    while True:
        await asyncio.sleep(EXPIRE_EVERY_S)
        watcher.expire()
