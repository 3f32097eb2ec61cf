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


async def link(url: str, mbytes_per_s: str) -> None:
    """Run the link until stdin ends."""
    host, port = url.rpartition("/")[2].rsplit(":", 1)
    shaped = Link((host, int(port)), int(mbytes_per_s) * 10**6)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        own_url = f"nats://127.0.0.1:{listener.getsockname()[1]}"

        async def say_url(_question: list[str]) -> dict[str, Any]:
            return {"url": own_url}

        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(shaped.accept(listener))
            await answer(say_url)
            accepting.cancel()


PROMPT_TOKENS = 16
MAX_TOKENS = 400
"""Tokens of a request. A request lasts longer than most updates."""


class Load:
    """Endless streams, and the times at which their tokens arrived."""

    def __init__(self, rb: rollbus.Client, vocab_size: int) -> None:
        self._rb = rb
        self._vocab_size = vocab_size
        self._serials = itertools.count()
        self._times: list[float] = []

    async def stream(self) -> None:
        """Stream one request after the other until cancelled."""
        while True:
            first = next(self._serials) * PROMPT_TOKENS
            prompt = [token % self._vocab_size for token in range(first, first + PROMPT_TOKENS)]
            async for chunk in self._rb.generate(bus_request(prompt, MAX_TOKENS, routing=False)):
                self._times.extend([time.monotonic()] * chunk.num_tokens)

    async def count(self, question: list[str]) -> dict[str, Any]:
        """Return the number of tokens of a period."""
        begin, end = map(float, question)
        return {"tokens": bisect(self._times, end) - bisect(self._times, begin)}


async def load(url: str, vocab_size: str, num_streams: str) -> None:
    """Run the streams until stdin ends."""
    async with rollbus.connect(url, client="load") as rb:
        await rb.fleet.wait_for_workers()
        load = Load(rb, int(vocab_size))
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(load.stream(), name=f"stream {i}") for i in range(int(num_streams))]
            await answer(load.count)
            for stream in streams:
                stream.cancel()
