"""Rules for all responses: the request id, and the timeout for clients that do not read."""

import asyncio
import json
from pathlib import Path

import pytest

from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.small_tokenizers import make_byte_level, save
from tests.http.support import http_service
from tests.http.test_safety import GENERATING, becomes, posted
from tests.support.fleet import until_idle

PATH = "/inference/v1/generate"
LARGE = SyntheticConfig(num_layers=64, top_k=8, max_model_len=100_000)
"""Half a kilobyte of routed experts for each token."""
PROMPT = [7] * 40_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_cut_off(nats_url: str, fleet: str, stream: bool) -> None:
    """An unread response counts as in flight. After the timeout, it is cut, aborted and counted with status 408."""
    settings = Settings(max_in_flight=1, client_timeout_s=1.0)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 50_000 if stream else 1, "ignore_eos": True}}
    few = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    async with http_service(nats_url, fleet, settings, config=LARGE) as http:
        assert http.engine is not None
        async with posted(http, PATH, {**body, "stream": stream}) as reader:
            assert b"200" in await reader.readline()
            busy = await http.client.post(PATH, json=few)
            labels = {"method": "POST", "route": PATH, "model": "synthetic"}
            await becomes(http, "rollbus_http_requests_total", 1, **labels, status="408")
            await until_idle(http.engine, http.rb)
            assert (await http.client.post(PATH, json=few)).status_code == 200
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(len(PROMPT) * 512)
    assert busy.status_code == 429


async def test_a_client_that_disconnects_during_a_response_is_counted(nats_url: str, fleet: str) -> None:
    """If the client disconnects during a response, the rest is not produced, and the metric counts status 499."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    async with http_service(nats_url, fleet, config=LARGE) as http:
        async with posted(http, PATH, body) as reader:
            assert b"200" in await reader.readline()
        labels = {"method": "POST", "route": PATH, "model": "synthetic"}
        await becomes(http, "rollbus_http_requests_total", 1, **labels, status="499")


async def test_a_slow_client_receives_the_whole_response(nats_url: str, fleet: str) -> None:
    """The timeout applies to each piece, so a slow client receives the whole response."""
    settings = Settings(client_timeout_s=0.5)
    body = {"token_ids": PROMPT[:20_000], "sampling_params": {"max_tokens": 1}}
    async with http_service(nats_url, fleet, settings, config=LARGE) as http:
        parts = []
        async with http.client.stream("POST", PATH, json=body) as stream:
            async for part in stream.aiter_raw():
                parts.append(part)
                await asyncio.sleep(0.001)
    routed = json.loads(b"".join(parts))["choices"][0]["routed_experts"]
    assert routed["shape"] == [20_000, 64, 8]


async def test_a_body_that_does_not_arrive_gives_408(nats_url: str, fleet: str) -> None:
    """A body that does not arrive gives 408 and closes the connection."""
    async with http_service(nats_url, fleet, Settings(client_timeout_s=0.3)) as http:
        host, port = http.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
        writer.write(f"{sent}{{".encode())
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "body_timeout"


async def test_every_response_has_a_request_id(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Each response has the client's request id if it is valid, or a new one, also for errors before a request."""
    settings = Settings(
        token="data", admin_token="admin", max_body_bytes=1000, tokenizer=save(make_byte_level(), tmp_path)
    )
    async with http_service(nats_url, fleet, settings) as http:

        async def ask(method: str, path: str, status: int, token: str = "admin", content: bytes = b"") -> None:
            for given, returned in (("mine", "mine"), ("not\tusable", None)):
                headers = {"Authorization": f"Bearer {token}", "X-Request-Id": given}
                answer = await http.client.request(method, path, content=content, headers=headers)
                assert answer.status_code == status
                ids = answer.headers.get_list("X-Request-Id")
                assert len(ids) == 1
                assert ids[0] == returned or (returned is None and len(ids[0]) == 32)

        await ask("GET", "/health", 200)
        await ask("GET", "/nowhere", 404)
        await ask("DELETE", "/health", 405)
        await ask("GET", "/v1/rl/state", 401, token="wrong")
        await ask("GET", "/v1/rl/state", 200)
        await ask("POST", "/pause", 200)
        await ask("POST", "/resume", 200)
        for path in GENERATING:
            await ask("POST", path, 400, content=b"{")
            await ask("POST", path, 413, content=b" " * 1001)
