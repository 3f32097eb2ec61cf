"""The proxy behaves like a real network, so that fault tests are valid."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.support.patience import SOON_S
from tests.support.tcp_proxy import Direction, TcpProxy, tcp_proxy


@contextlib.asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[TcpProxy]:
    """Run an echo server and a proxy in front of it."""
    async with asyncio.TaskGroup() as tasks:

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def serve() -> None:
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            async with server:
                port.set_result(server.sockets[0].getsockname()[1])
                await server.serve_forever()

        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = tasks.create_task(serve())
        async with asyncio.timeout(SOON_S), tcp_proxy(f"nats://127.0.0.1:{await port}") as proxy:
            yield proxy
        serving.cancel()


@contextlib.asynccontextmanager
async def connected(proxy: TcpProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect through `proxy`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_cut_closes_connections_and_refuses_new_connections() -> None:
    """A cut closes all connections and refuses new ones; after the repair, connections work on the same port."""
    async with echo_behind_proxy() as proxy:
        async with connected(proxy) as (reader, writer):
            writer.write(b"x")
            await reader.readexactly(1)
            url = proxy.url
            proxy.cut()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            async with connected(proxy):
                pass
        await proxy.restore()

        assert proxy.url == url
        async with connected(proxy) as (reader, writer):
            writer.write(b"y")
            assert await reader.readexactly(1) == b"y"


@pytest.mark.parametrize("direction", [Direction.TO_SERVER, Direction.TO_CLIENT, Direction.BOTH])
async def test_a_partition_holds_bytes_and_closes_no_connection(direction: Direction) -> None:
    """While a direction is frozen, no bytes arrive and no connection closes.

    After the thaw all bytes arrive, also those of new connections.
    """
    async with echo_behind_proxy() as proxy, connected(proxy) as (reader, writer):
        writer.write(b"before ")
        assert await reader.readexactly(7) == b"before "
        proxy.freeze(direction)
        writer.write(b"meanwhile")
        async with connected(proxy) as (newer, say):
            say.write(b"new")
            for silent in (reader, newer):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(silent.read(1), 0.02)
            proxy.thaw()

            assert await newer.readexactly(3) == b"new"
        assert await reader.readexactly(9) == b"meanwhile"
