"""`bench.weights` is realistic: its trainer changes as much as a real trainer, and its link has the given rate."""

import asyncio
import time

import pytest

pytest.importorskip("vllm")


from bench.processes import own_process

pytestmark = pytest.mark.vllm


async def test_a_link_passes_all_bytes_within_its_rate() -> None:
    """A link passes all bytes in both directions, within its rate. If one side closes, the other side closes too."""
    sent, rate = bytes(range(256)) * 8192, 8
    received = asyncio.Queue[bytes]()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(len(sent))
        writer.write(data)
        await received.put(data)
        await received.put(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, own_process("link", "weights_link:link", _url(server.sockets[0].getsockname()), rate) as link:
        answer = await link.ask("url")
        host, port = str(answer["url"]).removeprefix("nats://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        began = time.monotonic()
        writer.write(sent)
        there = await received.get()
        back = await reader.readexactly(len(sent))
        seconds = time.monotonic() - began
        writer.close()
        rest = await received.get()

    assert there == back == sent
    # The link allows an immediate burst of a hundredth of a second.
    assert seconds > 2 * len(sent) / (rate * 10**6) - 0.05
    assert rest == b""


def _url(address: tuple[str, int]) -> str:
    return f"nats://{address[0]}:{address[1]}"
