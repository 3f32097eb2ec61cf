"""TLS connections to a server that disconnects, returns or stops answering, during and after the handshake."""

import asyncio
from pathlib import Path

import pytest

from rollbus.bus.nats.connection import Connection, open_connection
from rollbus.schemas.errors import BusBroken
from tests.support.tls_server import TlsServer
from tests.support.waits import on_both_loops, until_true

ENDS_WITHIN_S = 15.0
"""Far longer than needed, but half the time that a TLS connection waits for the peer's close message."""

pytestmark = pytest.mark.slow


async def opened(server: TlsServer) -> Connection:
    """Open a connection to the server."""
    return await open_connection(server.server, name="test")


@on_both_loops
async def test_a_connection_is_opened_again(tmp_path: Path, loop: str) -> None:
    """The connection is opened again after the server has returned."""
    async with TlsServer(tmp_path).beside() as server:
        connection = await opened(server)
        server.go_away()
        await until_true(lambda: not connection.is_connected)
        # In this time some attempts to connect are refused.
        await asyncio.sleep(0.6)
        server.listen()
        await until_true(lambda: connection.is_connected)
        assert connection.counters().reconnects == 1
        await connection.shut()


@on_both_loops
async def test_a_handshake_that_never_ends_fails_at_the_timeout(tmp_path: Path, loop: str) -> None:
    """Connecting fails at the timeout if the handshake never ends."""
    async with TlsServer(tmp_path, shakes_hands=False).beside() as server, asyncio.timeout(ENDS_WITHIN_S):
        with pytest.raises(BusBroken, match="within 1 s"):
            await open_connection(server.server, name="test", timeout_s=1)


@on_both_loops
async def test_closing_during_a_handshake_ends_soon(tmp_path: Path, loop: str) -> None:
    """Closing during a handshake ends soon."""
    async with TlsServer(tmp_path).beside() as server:
        connection = await opened(server)
        server.shakes_hands = False
        server.go_away()
        server.listen()
        # The next connection is now in its handshake.
        await asyncio.sleep(1)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await connection.shut(timeout_s=0.5)


@on_both_loops
async def test_closing_does_not_wait_for_a_server_without_close_message(tmp_path: Path, loop: str) -> None:
    """Closing does not wait half a minute, as TLS would, for a server that sends no close message."""
    async with TlsServer(tmp_path, answers=False).beside() as server:
        connection = await opened(server)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await connection.shut(timeout_s=0.5)
