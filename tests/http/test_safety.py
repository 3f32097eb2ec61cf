"""Limits on requests of clients, and no work for clients that have disconnected."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.http.app import ADMIN, DATA
from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.small_tokenizers import make_byte_level, save
from tests.http.support import Http, http_service
from tests.http.test_metrics import parse, value
from tests.support.fleet import is_idle, until_idle
from tests.support.waits import until_true

LONG = 60_000
"""So many tokens take these engines longer than the time limit of a test."""
GENERATING: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": LONG, "ignore_eos": True}},
    "/v1/chat/completions": {
        "model": "synthetic",
        "messages": [{"role": "user", "content": "the"}],
        "max_tokens": LONG,
        "ignore_eos": True,
    },
    "/v1/completions": {"model": "synthetic", "prompt": [1], "max_tokens": LONG, "ignore_eos": True},
}
SLOW = SyntheticConfig(step_s=0.01)


@contextlib.asynccontextmanager
async def posted(http: Http, path: str, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a separate connection, which is closed when the block ends."""
    host, port = http.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def becomes(http: Http, name: str, wanted: float, **labels: str) -> None:
    """Wait until a counter has a value."""
    while True:
        found = parse((await http.client.get("/metrics")).text)
        if found.get((name, frozenset(labels.items()))) == wanted:
            return
        await asyncio.sleep(0.02)


async def test_bodies_are_bounded(nats_url: str, fleet: str) -> None:
    """A body above the limit gives 413 on each route, if its length is declared and also if it is chunked."""
    async with http_service(nats_url, fleet, Settings(max_body_bytes=1000)) as http:
        host, port = http.url.removeprefix("http://").split(":")

        async def chunked() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 500

        for method, path in (key for key, route in {**DATA, **ADMIN}.items() if route.body is not None):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 1001"
            writer.write(f"{head}\r\n\r\n".encode())
            assert (await reader.readline()).split()[1] == b"413", path
            writer.close()
            answer = await http.client.request(method, path, content=chunked())
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large"), path
        assert (await http.client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
async def test_a_request_beyond_the_limit_gives_429(nats_url: str, fleet: str, tmp_path: Path, path: str) -> None:
    """A request beyond the limit gives 429 with Retry-After, until another request has ended."""
    settings = Settings(max_in_flight=1, tokenizer=save(make_byte_level(), tmp_path))
    body = GENERATING[path]
    async with http_service(nats_url, fleet, settings, config=SLOW) as http:
        async with posted(http, path, {**body, "stream": True}) as reader:
            assert b"200" in await reader.readline()
            for stream in (False, True):
                refused = await http.client.post(path, json={**body, "stream": stream})
                assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        await becomes(http, "rollbus_http_generations_in_flight", 0, model="synthetic")
        async with posted(http, path, {**body, "stream": True}) as reader:
            assert b"200" in await reader.readline()
        assert http.engine is not None
        await until_idle(http.engine, http.rb)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
async def test_the_request_of_a_disconnected_client_is_aborted_and_counted(
    nats_url: str, fleet: str, tmp_path: Path, path: str, stream: bool
) -> None:
    """If a client disconnects, before or after the first token, its request is aborted in the engine and counted."""
    settings = Settings(tokenizer=save(make_byte_level(), tmp_path))
    body = {**GENERATING[path], "stream": stream}
    async with http_service(nats_url, fleet, settings, config=SLOW) as http:
        assert http.engine is not None
        async with posted(http, path, body) as reader:
            if stream:
                await reader.readuntil(b"data: ")
            engine = http.engine
            await until_true(lambda: not is_idle(engine))
        await becomes(http, "rollbus_http_generations_total", 1, model="synthetic", outcome="left")
        await until_idle(http.engine, http.rb)

        await http.rb.fleet.pause()
        async with posted(http, path, body):
            await becomes(http, "rollbus_http_generations_in_flight", 1, model="synthetic")
        await becomes(http, "rollbus_http_generations_total", 2, model="synthetic", outcome="left")
        await http.rb.fleet.resume()
        await until_idle(http.engine, http.rb)
        found = parse((await http.client.get("/metrics")).text)
    labels = {"method": "POST", "route": path, "model": "synthetic", "status": "499"}
    assert value(found, "rollbus_http_requests_total", **labels) == 2
