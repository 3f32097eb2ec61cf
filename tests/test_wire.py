"""The connection to a server that sends invalid data, or sends faster than the client reads."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlparse

import pytest
from nats import errors as nats_errors
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import open_connection, publish, subscribe
from rollbus.bus.nats.transport import MAX_UNREAD_BYTES, NatsTransport, NoNats, SubscriptionMessage
from tests.support.waits import on_both_loops, until_true

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def sending(data: bytes, *, stays: bool) -> Serve:
    """Return a server that sends `data`, then disconnects or waits for the client to disconnect."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if stays:
            await reader.read()

    return serve


@contextlib.asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[NatsTransport]:
    """Run a server with `serve` and connect to it."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()
        served.set()

    served = asyncio.Event()
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        wire = NatsTransport()
        port = server.sockets[0].getsockname()[1]
        await wire.connect(urlparse(f"nats://127.0.0.1:{port}"), 0, 3)
        try:
            yield wire
        finally:
            wire.abort()
            await wire.wait_closed()
            await served.wait()


@on_both_loops
async def test_messages_of_all_sizes_arrive_unchanged(nats_url: str, fleet: str, loop: str) -> None:
    """Messages of all sizes, with and without headers, arrive unchanged on both event loops."""
    nats = await open_connection(nats_url, name="test")
    sizes = [0, 1, 100, 8191, 8192, 16_384, 16_385, 65_536, 100_000, nats.max_payload - 100]
    sent = [(os.urandom(size), headers) for size in sizes for headers in (None, {"k": "v" * 20})] * 3
    received: list[Msg] = []

    async def receive(message: Msg) -> None:
        received.append(message)

    subject = f"test.{fleet}"
    await subscribe(nats, subject, receive)
    for payload, headers in sent:
        await publish(nats, subject, payload, headers=headers)
    await until_true(lambda: len(received) == len(sent))
    assert [(message.data, message.headers) for message in received] == sent
    await nats.shut()


@on_both_loops
async def test_a_client_that_does_not_read_slows_the_server_down(loop: str) -> None:
    """A client that does not read slows a fast server down and loses no message."""
    message = b"MSG a 1 60000\r\n" + b"x" * 60_000 + b"\r\n"
    num_messages = 2000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(num_messages):
            writer.write(message)
            await writer.drain()
        await reader.read()

    async with connected(serve) as wire:
        await asyncio.sleep(0.3)
        taken = list(await wire.operations())
        # A single read adds at most the buffer size of asyncio or uvloop.
        assert (
            sum(len(one.payload) for one in taken if isinstance(one, SubscriptionMessage)) < MAX_UNREAD_BYTES + 200_000
        )
        while len(taken) < num_messages:
            taken += await wire.operations()
        assert len(taken) == num_messages


async def test_empty_messages_count_towards_the_limit() -> None:
    """Empty messages count towards the limit, because they also use memory."""
    async with connected(sending(b"MSG a 1 0\r\n\r\n" * 500_000, stays=True)) as wire:
        await asyncio.sleep(0.3)
        assert len(list(await wire.operations())) < 100_000


async def test_messages_before_the_end_of_the_connection_are_returned_first() -> None:
    """Messages that arrived before the end of the connection are returned first, then the end is raised."""
    async with connected(sending(b"PING\r\nMSG a 1 3\r\nabc\r\nMSG a 1 30000\r\nabc", stays=False)) as wire:
        taken = list(await wire.operations())
        with pytest.raises(nats_errors.UnexpectedEOF):
            await wire.operations()
        assert taken == [b"PING\r\n", SubscriptionMessage(1, b"a", b"", None, b"abc")]
        assert wire.at_eof()
        with pytest.raises(ConnectionResetError):
            await wire.drain()


async def test_the_first_lines_are_read_separately() -> None:
    """The first lines are read one by one, and at the end of the connection a line is empty."""
    async with connected(sending(b"INFO {}\r\nPONG\r\nINFO {1}\r\n", stays=False)) as wire:
        assert await wire.readline() == b"INFO {}\r\n"
        assert await wire.readline() == b"PONG\r\n"
        assert list(await wire.operations()) == [b"INFO {1}\r\n"]
        assert await wire.readline() == b""


async def test_invalid_nats_data_ends_the_connection() -> None:
    """Invalid NATS data ends the connection."""
    async with connected(sending(b"+OK\r\nMSG a 1 2\r\nabcdef", stays=True)) as wire:
        taken = list(await wire.operations())
        assert taken[0] == b"+OK\r\n"
        with pytest.raises(NoNats, match="does not end where it should"):
            await wire.operations()
        with pytest.raises(ConnectionResetError):
            wire.write(b"PING\r\n")


async def test_without_a_connection_reads_and_writes_raise_an_error() -> None:
    """Reads and writes without a connection raise an error instead of waiting."""
    wire = NatsTransport()
    wire.abort()
    assert wire.at_eof()
    with pytest.raises(ConnectionResetError):
        wire.write(b"PING\r\n")
    with pytest.raises(ConnectionResetError):
        await wire.operations()
