"""Clients that send slowly or not at all do not block the HTTP service for other clients."""

import asyncio
import contextlib
import json
import random
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollbus.frontend.http import edge, server
from rollbus.frontend.http.edge import EXPENDABLE, MAX_HEAD_BYTES, ConnectionTable, Stage, max_connections
from rollbus.frontend.http.settings import Settings
from tests.cli.support import ENV, command
from tests.http.support import http_service
from tests.http.test_metrics import parse
from tests.http.test_safety import LONG, SLOW, becomes
from tests.support.patience import HANGS_AFTER_S, SOON_S

PATH = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
"""An incomplete request head."""
DESCRIPTORS = 256
MANY = 300
"""The number of connections, which exceeds the number of descriptors."""


def half_a_body(length: int = 1000) -> bytes:
    """Return a request with an incomplete body."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"{head}\r\n\r\n{{".encode()


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


def error_in(answer: bytes) -> tuple[int, str]:
    """Return status and error code of a response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@contextlib.asynccontextmanager
async def few_descriptors(nats_url: str, fleet: str, *options: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run the service with few file descriptors. Yield a client of it."""
    args = command("frontend", "--json", "--nats", nats_url, "--fleet", fleet, "--http", "127.0.0.1:0", *options)
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *args, env=ENV, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = json.loads(await process.stdout.readline())["http"]
        async with httpx.AsyncClient(base_url=url, timeout=HANGS_AFTER_S) as client:
            yield client
            assert process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", HALF, half_a_body()], ids=["nothing", "half a head", "half a body"])
async def test_more_slow_clients_than_descriptors_block_no_request(nats_url: str, fleet: str, sent: bytes) -> None:
    """With many slow clients, `/health` and complete requests are answered. The oldest slow connections are closed."""
    async with few_descriptors(nats_url, fleet) as client, contextlib.AsyncExitStack() as stack:
        await client.get("/health")
        slow = [await stack.enter_async_context(connected(str(client.base_url), sent)) for _ in range(MANY)]
        for _ in range(3):
            async with httpx.AsyncClient(base_url=client.base_url, timeout=HANGS_AFTER_S) as other:
                assert (await other.get("/health")).status_code == 200
                assert (await other.post("/v1/tokenize", json={"prompt": "a"})).status_code == 503
            assert (await client.get("/health")).status_code == 200
        oldest = await rest_of(slow[0][0])
        # On a slow machine, its deadline may expire before the service needs room.
        assert not oldest or error_in(oldest) == (408, "head_timeout")
        found = parse((await client.get("/metrics")).text)
        cut = [count for (name, _), count in found.items() if name == "rollbus_http_connections_cut_total"]
        assert sum(cut) >= MANY - DESCRIPTORS


@pytest.mark.slow
async def test_incomplete_heads_are_closed_at_the_deadline(nats_url: str, fleet: str) -> None:
    """All incomplete heads are closed at the deadline, and their descriptors are freed."""
    async with (
        few_descriptors(nats_url, fleet, "--client-timeout", "1") as client,
        contextlib.AsyncExitStack() as stack,
    ):
        slow = [await stack.enter_async_context(connected(str(client.base_url), HALF)) for _ in range(MANY)]
        answers = [await rest_of(reader) for reader, _ in slow]
        assert {error_in(answer) for answer in answers if answer} == {(408, "head_timeout")}
        assert (await client.get("/health")).status_code == 200


@pytest.mark.slow
async def test_single_bytes_of_a_head_do_not_extend_the_deadline(nats_url: str, fleet: str) -> None:
    """Single bytes of a head do not extend the deadline, for the first request of a connection and for later requests.

    Bytes that the client sends afterwards reset the connection, which may lose the response.
    """
    async with http_service(nats_url, fleet, Settings(client_timeout_s=0.5)) as http:
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
            async with connected(http.url, before) as (reader, writer), asyncio.TaskGroup() as tasks:
                if before:
                    await reader.readuntil(b"\r\n\r\n")
                ended = tasks.create_task(rest_of(reader))
                for byte in HALF + b"a" * 100_000:
                    writer.write(bytes([byte]))
                    await asyncio.wait([ended], timeout=0.05)
                    if ended.done():
                        break
            assert not ended.result() or error_in(ended.result()) == (408, "head_timeout")
        await becomes(http, "rollbus_http_connections_cut_total", 2, reason="head_timeout")


async def test_an_endless_head_gives_431(nats_url: str, fleet: str) -> None:
    """A head larger than any client sends gives 431. Without httptools, h11 applies a smaller limit."""
    pytest.importorskip("httptools")
    async with http_service(nats_url, fleet) as http, connected(http.url, HALF + b"a" * MAX_HEAD_BYTES) as (reader, _):
        assert error_in(await rest_of(reader)) == (431, "head_too_large")


async def test_endless_trailers_end_the_connection(nats_url: str, fleet: str) -> None:
    """Endless trailers end the connection, while the body is read and also after an early response."""
    pytest.importorskip("httptools")
    declared = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: "
    async with http_service(nats_url, fleet) as http:
        for path in (PATH, "/nowhere"):
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
            async with connected(http.url, head + declared) as (reader, writer):
                if path != PATH:
                    assert b"404" in await reader.readline()
                with contextlib.suppress(ConnectionError):
                    for _ in range(64):
                        writer.write(b"a" * (MAX_HEAD_BYTES // 16))
                        await writer.drain()
                await rest_of(reader)


async def test_the_head_limit_does_not_apply_to_bodies(nats_url: str, fleet: str) -> None:
    """The head limit does not apply to bodies, chunked or not, also after an early response."""

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


async def test_bytes_that_are_not_http_get_an_error(nats_url: str, fleet: str) -> None:
    """Bytes that are not HTTP get an error in the usual format."""
    async with http_service(nats_url, fleet) as http, connected(http.url, b"\x00\x01\r\n\r\n") as (reader, _):
        assert error_in(await rest_of(reader)) == (400, "invalid_http")


async def test_idle_connections_are_closed(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is closed, and so is one that still sends its body after an early response."""
    for module in (edge, server):
        monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.1)
    async with http_service(nats_url, fleet, Settings(client_timeout_s=0.5)) as http:
        async with connected(http.url, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as (reader, _):
            assert b"200" in await rest_of(reader)
        unread = half_a_body().replace(b"POST", b"GET")
        async with connected(http.url, unread) as (reader, writer):
            assert b"405" in await reader.readline()
            writer.write(b" ")
            await rest_of(reader)


@pytest.mark.slow
async def test_requests_leave_room_for_health_checks(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections with complete requests are never closed. A request beyond the limit gets 503 with Retry-After.

    `/health` is still answered.
    """
    limit = 16
    monkeypatch.setattr(server, "max_connections", lambda _: limit)
    body = {"token_ids": [1], "stream": True, "sampling_params": {"max_tokens": LONG, "ignore_eos": True}}
    async with http_service(nats_url, fleet, config=SLOW) as http, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=http.url, timeout=HANGS_AFTER_S))
        streams = [
            await stack.enter_async_context(client.stream("POST", PATH, json=body)) for _ in range(limit - limit // 8)
        ]
        assert {stream.status_code for stream in streams} == {200}
        refused = await client.post(PATH, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert (refused.headers["Retry-After"], refused.headers["Connection"]) == ("1", "close")
        for _ in range(limit):
            await stack.enter_async_context(connected(http.url, HALF))
            await stack.enter_async_context(connected(http.url, half_a_body()))
            assert (await client.get("/health")).status_code == 200
        for stream in streams:
            assert (await anext(stream.aiter_raw())).startswith(b"data: ")


@pytest.mark.slow
async def test_incomplete_bodies_are_closed_before_a_request_is_refused(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections with incomplete bodies are closed before the service refuses a request."""
    monkeypatch.setattr(server, "max_connections", lambda _: 16)
    async with http_service(nats_url, fleet) as http, contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(http.url, half_a_body())) for _ in range(14)]
        await becomes(http, "rollbus_http_connections_cut_total", 1, reason="too_many")
        assert (await http.client.post(PATH, json=BODY)).status_code == 200
        assert await rest_of(slow[0][0]) == b""


async def test_pipelined_requests_are_all_answered(nats_url: str, fleet: str) -> None:
    """Pipelined requests on one connection are all answered, and the connection stays open."""
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with http_service(nats_url, fleet) as http, connected(http.url, 3 * request) as (reader, writer):
        for _ in range(3):
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.write(request)
        assert b"200" in await reader.readuntil(b"\r\n\r\n")


async def test_the_service_continues_without_free_descriptors(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of accept, the service waits, and closes the oldest connection without a request."""
    async with http_service(nats_url, fleet) as http, connected(http.url) as (reader, _):
        assert (await http.client.get("/health")).status_code == 200
        accept, errors = socket.socket.accept, iter([OSError(24, "Too many open files"), ConnectionAbortedError()])

        def fail_first(listening: socket.socket) -> tuple[socket.socket, Any]:
            error = next(errors, None)
            if error is not None:
                raise error
            return accept(listening)

        monkeypatch.setattr(socket.socket, "accept", fail_first)
        async with httpx.AsyncClient(base_url=http.url, timeout=HANGS_AFTER_S) as other:
            assert (await other.get("/health")).status_code == 200
        assert await rest_of(reader) == b""
        assert next(errors, None) is None


def test_incomplete_heads_are_closed_first_and_complete_requests_never() -> None:
    """The order of closing is: incomplete heads, idle, viewers, incomplete bodies, and never complete requests."""
    table: ConnectionTable[str] = ConnectionTable(7)
    for name, stage in (
        ("answer", Stage.ANSWER),
        ("body", Stage.BODY),
        ("watching", Stage.WATCHING),
        ("idle", Stage.IDLE),
        ("head", Stage.HEAD),
        ("later head", Stage.HEAD),
    ):
        table.move(name, stage)
    was_full = table.is_full
    table.move("last head", Stage.HEAD)
    assert (was_full, table.is_full) == (False, True)
    closed = []
    while (victim := table.victim(*EXPENDABLE)) is not None:
        closed.append(victim)
        table.remove(victim)
        table.remove(victim)
    assert closed == ["head", "later head", "last head", "idle", "watching", "body"]
    assert table.stage("answer") is Stage.ANSWER
    assert len(table) == 1


def test_a_connection_is_in_one_stage() -> None:
    """Each connection is in one stage, and the order within a stage is that of the last change."""
    table: ConnectionTable[int] = ConnectionTable(8)
    chance = random.Random(1)
    stages: dict[int, Stage] = {}
    for _ in range(2000):
        number, stage = chance.randrange(8), chance.choice([*Stage, None])
        stages.pop(number, None)
        if stage is None:
            table.remove(number)
        else:
            table.move(number, stage)
            stages[number] = stage
        assert len(table) == len(stages)
        assert table.stage(number) is stage
        for each in Stage:
            assert table.victim(each) == next((found for found, its in stages.items() if its is each), None)
        requests = sum(its in (Stage.BODY, Stage.ANSWER) for its in stages.values())
        assert table.has_too_many_requests == (requests > 7)


def test_connections_fit_into_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection limit leaves spare descriptors. With many descriptors, it exceeds the limit of requests."""
    limits = {"rlimit": (DESCRIPTORS, DESCRIPTORS)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["rlimit"])
    assert max_connections(1024) <= DESCRIPTORS - 32
    limits["rlimit"] = (10, 10)
    assert max_connections(1024) == 8
    for unlimited in ((1 << 20, 1 << 20), (resource.RLIM_INFINITY,) * 2):
        limits["rlimit"] = unlimited
        assert max_connections(1024) == 4096
        assert max_connections(10_000) == 20_000
