"""The processes beside a fleet for `bench.weights`: a link of limited bandwidth, and clients that keep the fleet busy.

The link is TCP to a server, as over a network card. All connections through it share this number of megabytes per
second in each direction. It answers each line on stdin with its URL.

The clients have their own process, so that they do not count for the trainer. STREAMS requests are streamed at any
time. When a request ends, the next one starts. The program answers each line `FROM TO` on stdin, in seconds of
`time.monotonic`, with the number of tokens that arrived in that time.
"""

import asyncio
import contextlib
import itertools
import socket
import time
from bisect import bisect
from typing import Any, Final

import rollbus
from bench.processes import answer, bus_request

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


async def accept(listener: socket.socket, server: tuple[str, int], rate: int) -> None:
    """Connect each client to the server until cancelled. All share `rate` bytes per second in each direction."""
    loop, up, down = asyncio.get_running_loop(), Direction(rate), Direction(rate)

    async def connect(client: socket.socket) -> None:
        with client, socket.socket() as onward:
            for side in (client, onward):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            await loop.sock_connect(onward, server)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(pass_on(client, onward, up))
                ways.create_task(pass_on(onward, client, down))

    async with asyncio.TaskGroup() as connections:
        while True:
            client, _ = await loop.sock_accept(listener)
            connections.create_task(connect(client))


async def pass_on(source: socket.socket, sink: socket.socket, direction: Direction) -> None:
    """Pass bytes from `source` to `sink` at the rate of the link. When one side ends, shut down the other side."""
    loop, piece = asyncio.get_running_loop(), memoryview(bytearray(PIECE_BYTES))
    with contextlib.suppress(OSError):
        while count := await loop.sock_recv_into(source, piece):
            await direction.take(count)
            await loop.sock_sendall(sink, piece[:count])
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


async def link(url: str, mbytes_per_s: str) -> None:
    """Run the link until stdin ends."""
    host, port = url.rpartition("/")[2].rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        own_url = f"nats://127.0.0.1:{listener.getsockname()[1]}"

        async def say_url(_question: list[str]) -> dict[str, Any]:
            return {"url": own_url}

        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(accept(listener, (host, int(port)), int(mbytes_per_s) * 10**6))
            await answer(say_url)
            accepting.cancel()


PROMPT_TOKENS = 16
MAX_TOKENS = 400
"""Tokens of a request. A request lasts longer than most updates."""


async def load(url: str, vocab_size: str, num_streams: str) -> None:
    """Run the streams until stdin ends."""
    serials = itertools.count()
    arrived: list[float] = []

    async def stream(rb: rollbus.Client) -> None:
        """Stream one request after the other until cancelled."""
        while True:
            first = next(serials) * PROMPT_TOKENS
            prompt = [token % int(vocab_size) for token in range(first, first + PROMPT_TOKENS)]
            async for chunk in rb.generate(bus_request(prompt, MAX_TOKENS, routing=False)):
                arrived.extend([time.monotonic()] * chunk.num_tokens)

    async def count(question: list[str]) -> dict[str, Any]:
        """Return the number of tokens of a period."""
        begin, end = map(float, question)
        return {"tokens": bisect(arrived, end) - bisect(arrived, begin)}

    async with rollbus.connect(url, client="load") as rb:
        await rb.fleet.wait_for_workers()
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(stream(rb), name=f"stream {i}") for i in range(int(num_streams))]
            await answer(count)
            for task in streams:
                task.cancel()
