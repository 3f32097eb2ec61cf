"""NATS connections for tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from rollbus.bus.nats.connection import Connection, open_connection
from tests.support.patience import SOON_S
from tests.support.waits import until_true


@contextlib.asynccontextmanager
async def opened(
    url: str,
    *,
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
    on_error: Callable[[Exception], None] = lambda _: None,
) -> AsyncIterator[Connection]:
    """Open a connection and close it at the end of the block."""
    connection = await open_connection(url, name="test", timeout_s=SOON_S, on_reconnect=on_reconnect, on_error=on_error)
    try:
        yield connection
    finally:
        await connection.shut(timeout_s=0.1)


def event_callback(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """Return a callback that sets `event`."""

    async def callback() -> None:
        event.set()

    return callback


async def until_lost(connection: Connection) -> None:
    """Wait until the connection has noticed its first loss."""
    await until_true(lambda: connection.counters().disconnects > 0)


async def count_tasks() -> int:
    """Return the number of other tasks, after the cancelled tasks have ended."""
    for _ in range(10):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1
