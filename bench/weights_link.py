"""A link of limited bandwidth for `bench.weights` in its own process: TCP to a server, as over a network card.

    python -m bench.weights_link URL MBYTES_PER_S

All connections through the link share this number of megabytes per second in each direction. The program answers each
line on stdin with its URL.
"""

import asyncio
import contextlib
import socket
import sys
import time
from typing import Any, Final

import uvloop

from bench.ways import answer

PIECE_BYTES: Final = 256 * 1024
"""Bytes that are passed on at a time: 5 ms at 50 MB/s. A token between two pieces of a checkpoint waits no longer than
this."""
BUFFER_BYTES: Final = 1024**2
"""Buffer of the system on each side. A connection has about as many bytes in flight in a network."""
BURST_S: Final = 0.01
"""Seconds of data that may pass immediately after an idle time, because sleeps are only this exact."""


class Direction:
    """One direction of a link.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_at = time.monotonic()

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` bytes have passed."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self._rate
        await asyncio.sleep(self._free_at - now)


class Link:
    """One link to a server.

    Args:
        server: host and port of the server.
        rate: bytes per second in each direction.
    """

    def __init__(self, server: tuple[str, int], rate: int) -> None:
        self._server = server
        self._up, self._down = Direction(rate), Direction(rate)

    async def accept(self, listener: socket.socket) -> None:
        """Connect each client to the server until cancelled."""
        async with asyncio.TaskGroup() as connections:
            while True:
                client, _ = await asyncio.get_running_loop().sock_accept(listener)
                connections.create_task(self._connect(client))

    async def _connect(self, client: socket.socket) -> None:
        with client, socket.socket() as onward:
            for side in (client, onward):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            await asyncio.get_running_loop().sock_connect(onward, self._server)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(pass_on(client, onward, self._up))
                ways.create_task(pass_on(onward, client, self._down))


async def pass_on(source: socket.socket, sink: socket.socket, direction: Direction) -> None:
    """Pass bytes from `source` to `sink` at the rate of the link. When one side ends, shut down the other side."""
    loop, piece = asyncio.get_running_loop(), memoryview(bytearray(PIECE_BYTES))
    with contextlib.suppress(OSError):
        while count := await loop.sock_recv_into(source, piece):
            await direction.take(count)
            await loop.sock_sendall(sink, piece[:count])
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


async def main(url: str, mbytes_per_s: int) -> None:
    """Run the link until stdin ends."""
    host, port = url.rpartition("/")[2].rsplit(":", 1)
    link = Link((host, int(port)), mbytes_per_s * 10**6)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        own_url = f"nats://127.0.0.1:{listener.getsockname()[1]}"

        async def say_url(_question: list[str]) -> dict[str, Any]:
            return {"url": own_url}

        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(link.accept(listener))
            await answer(say_url)
            accepting.cancel()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
