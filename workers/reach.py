"""Waits for a NATS server and for the queue of a model, because a supervisor may start the worker before the server."""

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
"""Seconds between two log lines about the wait. The end of a log then shows one, and a day has a few thousand."""

QUEUE_RETRY_S: Final = 1.0
"""Seconds between attempts to create the queue while the server starts or has no JetStream yet."""


async def wait_for_server(server: Server, *, name: str) -> None:
    """Wait without a time limit until a NATS server accepts this user.

    Args:
        name: name of the connection in the server's monitoring.

    Cancellation: leaves no connection open.

    Raises:
        BusBroken: the server refuses this user, or TLS fails. A longer wait would not help.
    """
    next_line_at = 0.0
    while True:
        try:
            connection = await open_connection(server, name=name)
        except ServerUnreachable as exc:
            # The attempt itself waited before it failed, so no sleep is needed.
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + REPEAT_S
                logger.warning("worker.server_awaited error=%s", exc)
        else:
            await connection.shut()
            return


async def wait_for_queue(nats: Connection, subjects: Subjects, model: str, pulls: PullerStats) -> None:
    """Wait until the queue exists, because clients publish to it as soon as they know that a worker serves.

    Args:
        pulls: counters of the task that pulls. In most cases that task created the queue while the engine started.
    """
    while not pulls.ensured:
        try:
            await ensure_queue(nats, subjects, model)
            return
        except BusBroken as exc:
            logger.warning("worker.queue_awaited model=%s error=%s", model, exc)
        await asyncio.sleep(QUEUE_RETRY_S)
