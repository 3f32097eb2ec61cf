"""Checks which servers of a cluster are reachable from here, for users that cannot query the cluster."""

import asyncio

from .connection import Connection

__all__ = ["describe_reachable"]

ATTEMPT_S = 2.0
"""Seconds for a server to accept a connection. A disconnected machine does not even reject it."""


async def describe_reachable(nats: Connection) -> str:
    """Connect to each named or learned server, and describe how many accept connections.

    A server that ended before this connection was opened is known only if its URL was named.
    """
    addresses = {(uri.hostname or "", uri.port or 0) for uri in nats.servers}
    async with asyncio.TaskGroup() as tasks:
        attempts = [tasks.create_task(_is_reachable(host, port)) for host, port in sorted(addresses)]
    return f"{sum(attempt.result() for attempt in attempts)} of {len(attempts)} known servers are reachable"


async def _is_reachable(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(ATTEMPT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # a TimeoutError is one
        return False
    writer.transport.abort()
    return True
