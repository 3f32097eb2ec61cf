"""Connections as tests use them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from rollbus.bus.nats.connection import Connection, open_connection
from tests.support.patience import SOON_S


@contextlib.asynccontextmanager
async def opened(
    url: str,
    *,
    on_disconnect: Callable[[], Awaitable[None]] | None = None,
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
    on_error: Callable[[Exception], None] = lambda _: None,
) -> AsyncIterator[Connection]:
    """Open a connection that is closed on leaving."""
    connection = await open_connection(
        url, name="test", timeout_s=SOON_S, on_disconnect=on_disconnect, on_reconnect=on_reconnect, on_error=on_error
    )
    try:
        yield connection
    finally:
        await connection.shut(timeout_s=0.1)


def event_callback(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """Make a callback that sets `event`."""

    async def callback() -> None:
        event.set()

    return callback


async def count_tasks() -> int:
    """Count the tasks besides this one, once those that were cancelled have ended."""
    for _ in range(10):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1
