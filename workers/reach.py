"""Waiting for a NATS server, as a supervisor expects of a process that it starts beside one."""

import logging
import time
from typing import Final

from ..bus.nats.connection import open_connection
from ..bus.nats.server import Server
from ..schemas.errors import ServerUnreachable

__all__ = ["REPEAT_S", "wait_for_server"]

logger = logging.getLogger(__name__)

REPEAT_S: Final = 30.0
"""Between two lines that say so: enough to be seen in the end of a log, and some thousand lines a day."""


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
