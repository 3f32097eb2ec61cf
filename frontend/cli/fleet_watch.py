"""What the workers of a local fleet announce, from before they start until after they have ended."""

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
"""How often leases are looked at: workers announce themselves as often."""


class LocalFleetWatch:
    """The workers that announce themselves.

    Args:
        changed: is set when one comes, goes or changes its state.
    """

    def __init__(self, watcher: PresenceWatcher, changed: asyncio.Event) -> None:
        self._watcher = watcher
        self._changed = changed

    async def wait_until_serving(self, workers: Sequence[str], timeout_s: float) -> None:
        """Wait until all of these serve.

        Raises:
            CommandFailed: they did not within `timeout_s` seconds; the message says what they do.
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
    """Listen to the announcements of a fleet's workers for a block. This is no client: workers take no notice of it.

    Args:
        on_presence: called with the live workers at each announcement of one.

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
