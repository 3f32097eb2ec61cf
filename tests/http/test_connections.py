"""Connections of the HTTP service, each with many requests, none, or none that is HTTP."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollbus.frontend.http import server
from rollbus.frontend.http.server import MAX_HEAD_BYTES, WANTED_DESCRIPTORS, raise_descriptor_limit
from tests.http.support import http_service
from tests.support.patience import SOON_S

PATH = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}


@contextlib.asynccontextmanager
async def connected(url: str, sent: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection and send these bytes. The connection is closed when the block ends."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the service closes the connection."""
    async with asyncio.timeout(SOON_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_bodies_may_be_larger_than_heads(nats_url: str, fleet: str) -> None:
    """A body may be larger than a head, chunked or not, also after an early response."""

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100):
            yield b" " * 100

    size = 8 * MAX_HEAD_BYTES
    async with http_service(nats_url, fleet) as http:
        for content in (pieces(size), b" " * size):
            answer = await http.client.post("/v1/tokenize", content=content)
            assert answer.json()["error"]["message"].startswith("the body is not JSON")
        for content in (pieces(size), b" " * size):
            assert (await http.client.post("/nowhere", content=content)).status_code == 404
            assert (await http.client.get("/health")).status_code == 200


async def test_bytes_that_are_not_http_get_400(nats_url: str, fleet: str) -> None:
    """Bytes that are not HTTP get 400, and the connection is closed."""
    async with http_service(nats_url, fleet) as http, connected(http.url, b"\x00\x01\r\n\r\n") as (reader, _):
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 400 ")


async def test_idle_connections_are_closed(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is idle after its response is closed."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with http_service(nats_url, fleet) as http, connected(http.url, request) as (reader, _):
        assert b"200" in await rest_of(reader)


async def test_pipelined_requests_are_all_answered(nats_url: str, fleet: str) -> None:
    """Pipelined requests on one connection are all answered, and the connection stays open."""
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with http_service(nats_url, fleet) as http, connected(http.url, 3 * request) as (reader, writer):
        for _ in range(3):
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.write(request)
        assert b"200" in await reader.readuntil(b"\r\n\r\n")


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit of descriptors is raised as far as the hard limit allows, and is never reduced."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    for soft, hard in ((1024, 4096), (1024, resource.RLIM_INFINITY), (1 << 20, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=(soft, hard): limit)
        raise_descriptor_limit()
    assert limits == [(4096, 4096), (WANTED_DESCRIPTORS, resource.RLIM_INFINITY)]
