"""Moves rows through nats-server with bare sockets. This is the limit for all ways through that server on a machine.

There is no client, no msgpack, no credit, no acknowledgement and no check. A thread writes segments of the array to one
socket. Another thread reads them from a second socket into the memory of the tensor.
"""

import asyncio
import io
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlparse

import numpy as np
import torch

from bench.routing_engine import Case, make_rows
from rollbus.bus.protocol.stream.chunk_writer import SEGMENT_BYTES

ASK, ROWS = "bench.ask", "bench.rows"
"""Subjects of the number of requested rows, and of their segments."""
OPTIONS = json.dumps({"verbose": False, "pedantic": False})


class Bare:
    """A connection to a NATS server that subscribes to one subject."""

    def __init__(self, address: str, subject: str) -> None:
        url = urlparse(address)
        self.socket = socket.create_connection((url.hostname, url.port))
        self._stream = io.BufferedReader(socket.SocketIO(self.socket, "r"), 64 * 1024)
        self._stream.readline()  # Skip INFO.
        self.socket.sendall(f"CONNECT {OPTIONS}\r\nSUB {subject} 1\r\nPING\r\n".encode())
        while self._stream.readline() != b"PONG\r\n":
            pass

    def close(self) -> None:
        """Close it."""
        self._stream.close()
        self.socket.close()

    def send(self, subject: str, payload: bytes | memoryview) -> None:
        """Publish, and wait until the operating system has accepted all bytes."""
        self.socket.sendall(f"PUB {subject} {len(payload)}\r\n".encode())
        self.socket.sendall(payload)
        self.socket.sendall(b"\r\n")

    def receive(self) -> int:
        """Wait for the first line of the next message and return its size. Return 0 if the connection ended."""
        while line := self._stream.readline():
            if line.startswith(b"MSG"):
                return int(line.split()[-1])
            if line == b"PING\r\n":
                self.socket.sendall(b"PONG\r\n")
        return 0

    def read(self, size: int) -> bytearray:
        """Read a message of this size."""
        data = bytearray(size)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Read a message of the size of `view` into `view`."""
        while len(view):
            view = view[self._stream.readinto(view) :]
        self._stream.read(2)


@asynccontextmanager
async def bare_server(case: Case, address: str) -> AsyncIterator[tuple[str, Callable[[], float]]]:
    """Run the side that has the array."""
    made, handed_at = make_rows(case), 0.0
    connection = await asyncio.to_thread(Bare, address, ASK)

    def serve() -> None:
        nonlocal handed_at
        while size := connection.receive():
            rows = made[: int(connection.read(size))].copy()
            handed_at = time.monotonic()
            connection.send(ROWS, json.dumps({"shape": rows.shape, "dtype": str(rows.dtype)}).encode())
            data = rows.data.cast("B")
            for first in range(0, len(data), SEGMENT_BYTES):
                connection.send(ROWS, data[first : first + SEGMENT_BYTES])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(serve))
        try:
            yield address, lambda: handed_at
        finally:
            # The shutdown ends the read of the thread.
            connection.socket.shutdown(socket.SHUT_RDWR)
    connection.close()


@asynccontextmanager
async def bare_client(address: str) -> AsyncIterator[Callable[[int], Awaitable[torch.Tensor]]]:
    """Run the side that receives the array."""
    connection = await asyncio.to_thread(Bare, address, ROWS)

    def fetch(num_tokens: int) -> torch.Tensor:
        connection.send(ASK, str(num_tokens).encode())
        rows = np.empty(**json.loads(connection.read(connection.receive())))
        view = rows.data.cast("B")
        while len(view):
            size = connection.receive()
            connection.fill(view[:size])
            view = view[size:]
        return torch.from_numpy(rows)

    async def get(num_tokens: int) -> torch.Tensor:
        return await asyncio.to_thread(fetch, num_tokens)

    try:
        yield get
    finally:
        connection.close()
