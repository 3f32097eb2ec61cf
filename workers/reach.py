"""Waiting for a NATS server, as a supervisor expects of a process that it starts beside one, and for a queue there."""

import asyncio
import logging
import time
from typing import Final

from ..bus.nats.connection import Connection, open_connection
from ..bus.nats.server import Server
from ..bus.queue.puller import PullerStats
from ..bus.queue.streams import ensure_queue
from ..bus.subjects import Subjects
from ..schemas.errors import BusBroken, ServerUnreachable

__all__ = ["REPEAT_S", "wait_for_queue", "wait_for_server"]

logger = logging.getLogger(__name__)

REPEAT_S: Final = 30.0
"""Between two lines that say so: enough to be seen in the end of a log, and some thousand lines a day."""

QUEUE_RETRY_S: Final = 1.0
"""Between attempts to make the queue, for a server that starts, or has no JetStream yet."""


async def wait_for_server(server: Server, *, name: str) -> None:
    """Return when a NATS server has let this user in, however long that takes.

    Args:
        name: what the server's monitoring shows.

    Cancellation: leaves nothing behind.

    Raises:
        BusBroken: the server refuses this user, or TLS with it fails: waiting would not help.
    """
    next_line_at = 0.0
    while True:
        try:
            connection = await open_connection(server, name=name)
        except ServerUnreachable as exc:
            # The attempt itself has waited.
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + REPEAT_S
                logger.warning("worker.waits_for_server error=%s", exc)
        else:
            await connection.shut()
            return


async def wait_for_queue(nats: Connection, subjects: Subjects, model: str, pulls: PullerStats) -> None:
    """Return when there is a queue: who hears that a worker serves publishes to it.

    Args:
        pulls: of the task that pulls; it has mostly made the queue while the engine was starting.
    """
    while not pulls.ensured:
        try:
            await ensure_queue(nats, subjects, model)
            return
        except BusBroken as exc:
            logger.warning("worker.waits_for_queue model=%s error=%s", model, exc)
        await asyncio.sleep(QUEUE_RETRY_S)
