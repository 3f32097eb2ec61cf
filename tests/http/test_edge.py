"""Connections of the HTTP service, each with many requests, none, or none that is HTTP."""

import asyncio
import contextlib
import gzip
import json
import resource
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import rollbus
from rollbus.frontend.http import Settings, edge, server
from rollbus.frontend.http.app import ADMIN, DATA
from rollbus.frontend.http.edge import MAX_HEAD_BYTES, MAX_QUEUED, SEND_BYTES
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.server import WANTED_DESCRIPTORS, raise_descriptor_limit
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Http, Serve, client_of, in_flight, make_byte_level, save
from tests.http.test_metrics import parse
from tests.support.fleet import StartServed, is_idle, until_idle
from tests.support.waits import SOON_S, until_true

PATH = "/inference/v1/generate"
TOKENS = Settings(token="data", admin_token="admin")
BODY: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
WRITING = ("calls", "edge", "writer")
"""The files that write the events of a stream."""


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


def post_head(path: str, length: int, method: str = "POST") -> bytes:
    """Return the head of a request whose body has so many bytes."""
    fields = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def posted(http: Http, path: str, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a separate connection, which is closed when the block ends."""
    data = json.dumps(body).encode()
    async with connected(http.url, post_head(path, len(data)) + data) as (reader, _):
        yield reader


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the service closes the connection."""
    async with asyncio.timeout(SOON_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_bodies_may_be_larger_than_heads(serve: Serve) -> None:
    """A body may be larger than a head, chunked or not, also after an early response."""

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100):
            yield b" " * 100

    size = 8 * MAX_HEAD_BYTES
    async with serve() as http:
        for content in (pieces(size), b" " * size):
            answer = await http.client.post("/v1/tokenize", content=content)
            assert answer.json()["error"]["message"].startswith("the body is not JSON")
        for content in (pieces(size), b" " * size):
            assert (await http.client.post("/nowhere", content=content)).status_code == 404
            assert (await http.client.get("/health")).status_code == 200


HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
TOKEN_IN_TRAILER = (
    b"POST /v1/rl/pause HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nAuthorization: Bearer admin\r\n\r\n"
)

STREAM = json.dumps({**BODY, "stream": True}).encode()
OLD_STREAM = post_head(PATH, len(STREAM)).replace(b"1.1\r\n", b"1.0\r\nAuthorization: Bearer data\r\n") + STREAM
EXPECT = b"Expect: 100-continue\r\n\r\n"
NEW_STREAM = OLD_STREAM.replace(b"1.0\r\n", b"1.1\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n")


async def test_what_is_not_http_1_1_is_refused_or_answered_safely(serve: Serve) -> None:
    """Other bytes get 400, and a head or a trailer without an end its end. An answer to HTTP/1.0 has no chunks.

    No 100 precedes it. A token in a trailer gives no access, because a proxy does not check trailers. If a client asks
    whether to send its body and gets an answer instead, the connection is closed: its next request would be
    read as the body.
    """
    sent = {
        "no HTTP": b"\x00\x01\r\n\r\n",
        "long head": HEALTH + b"X: " + b"x" * 2 * MAX_HEAD_BYTES,
        "HTTP/1.0": HEALTH.replace(b"1.1", b"1.0") + b"\r\n",
        "trailer": TOKEN_IN_TRAILER,
        "long trailer": TOKEN_IN_TRAILER.removesuffix(b"\r\n") + b"X: " + b"x" * 2 * MAX_HEAD_BYTES,
        "HTTP/1.0 stream": OLD_STREAM,
        "HTTP/2 offered": NEW_STREAM,
        "CONNECT": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "no body yet": post_head(PATH, 99)[:-2] + EXPECT,
        "HTTP/0.9": b"GET /health\r\n\r\n",
        "HTTP/0.9 with a host": HEALTH.replace(b"1.1", b"0.9") + b"\r\n",
        "no host": b"GET /health HTTP/1.1\r\n\r\n",
        "two hosts": HEALTH + b"host: other\r\n\r\n",
        "two hosts, HTTP/1.0": HEALTH.replace(b"1.1", b"1.0") + b"host: other\r\n\r\n",
        "no host, HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "no host, HTTP/2 offered": NEW_STREAM.replace(b"Host:", b"Other:"),
    }
    found = {}
    async with serve(TOKENS) as http:
        for name, data in sent.items():
            async with connected(http.url, data) as (reader, _):
                found[name] = (await rest_of(reader)).lower()
        async with connected(http.url, OLD_STREAM[: -len(STREAM) - 2] + EXPECT) as (reader, writer):
            await http.client.get("/health")  # the server has read the head
            writer.write(STREAM)
            found["HTTP/1.0, 100"] = (await rest_of(reader)).lower()
    assert found["no HTTP"].startswith(b"http/1.1 400 ")
    assert b" 200 " not in found["long head"]
    assert (b"connection: close" in found["HTTP/1.0"], b"chunked" in found["HTTP/1.0"]) == (True, False)
    assert b" 401 " in found["trailer"].splitlines()[0]
    assert b"connection: close" in found["no body yet"]
    assert b" 200 " not in found["long trailer"]
    for name in ("HTTP/1.0 stream", "HTTP/1.0, 100"):
        head, _, events = found[name].partition(b"\r\n\r\n")
        assert (b"connection: close" in head, b"chunked" in head) == (True, False), name
        assert (events[:6], events[-14:]) == (b"data: ", b"data: [done]\n\n")
    assert b"data: [done]" in found["HTTP/2 offered"]
    for name in ("CONNECT", "HTTP/0.9", "HTTP/0.9 with a host", "no host", "two hosts", "two hosts, HTTP/1.0"):
        assert found[name].startswith(b"http/1.1 400 "), name
    assert found["no host, HTTP/1.0"].startswith(b"http/1.1 200 ")
    assert found["no host, HTTP/2 offered"].startswith(b"http/1.1 400 ")


async def test_idle_connections_are_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is idle after its response is closed."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    async with serve() as http, connected(http.url, HEALTH + b"\r\n") as (reader, _):
        assert b"200" in await rest_of(reader)


async def test_pipelined_requests_are_all_answered(serve: Serve) -> None:
    """Pipelined requests on one connection are all answered, and the connection stays open."""
    request = HEALTH + b"\r\n"
    async with serve() as http, connected(http.url, 3 * request) as (reader, writer):
        for _ in range(3):
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.write(request)
        assert b"200" in await reader.readuntil(b"\r\n\r\n")


async def test_what_follows_a_request_does_not_replace_its_answer(serve: Serve) -> None:
    """If bytes behind a request are no request, the requests before them are answered. Then the connection is closed.

    A fault in the body of a request that waits for earlier answers gives it 400.
    """
    ok, bad, chunk = b"HTTP/1.1 200", b"HTTP/1.1 400", b"Transfer-Encoding: chunked\r\n\r\n"
    health, body = HEALTH + b"\r\n", json.dumps(BODY).encode()
    plain = post_head(PATH, len(body)) + body
    broken = post_head(PATH, 1).replace(b"Content-Length: 1\r\n\r\n", chunk) + b"no size\r\n"
    sent = {
        "one": (plain + b"\0\r\n\r\n", [ok]),
        "two": (health + plain + b"\0\r\n\r\n", [ok, ok]),
        "CONNECT": (plain + b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", [ok]),
        "no host": (plain + b"GET /health HTTP/1.1\r\n\r\n", [ok]),
        "after an offer of HTTP/2 and a close": (NEW_STREAM + health, [ok]),
        "body": (broken + b"\r\n" + health, [bad]),
        "later body": (health + broken + health, [ok, bad]),
        "too many": ((MAX_QUEUED + 2) * health, [ok] * (MAX_QUEUED + 1)),
        "too many offers of HTTP/2": (
            MAX_QUEUED * health + 2 * NEW_STREAM.replace(b"close, ", b""),
            [ok] * (MAX_QUEUED + 1),
        ),
    }
    async with serve() as http:
        for name, (data, answers) in sent.items():
            async with connected(http.url, data) as (reader, _):
                found = await rest_of(reader)
            assert [line[:12] for line in found.splitlines() if line.startswith(b"HTTP/1.1 ")] == answers, name
            if name.startswith(("later", "too")):
                assert found.lower().count(b"connection: close") == 1, name


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit of descriptors is raised as far as the hard limit allows, and is never reduced."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    for soft, hard in ((1024, 4096), (1024, resource.RLIM_INFINITY), (1 << 20, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=(soft, hard): limit)
        raise_descriptor_limit()
    assert limits == [(4096, 4096), (WANTED_DESCRIPTORS, resource.RLIM_INFINITY)]


# Compressed bodies, and the header that forbids retries.


async def test_a_compressed_body_is_refused(serve: Serve) -> None:
    """A compressed body is 415 with the header's name. A body that is declared as not compressed is read."""
    plain = json.dumps(BODY).encode()
    async with serve() as http:
        post = http.client.post
        packed = await post(PATH, content=gzip.compress(plain), headers={"Content-Encoding": "gzip"})
        read = await post(PATH, content=plain, headers={"Content-Encoding": "Identity"})
    error = packed.json()["error"]
    assert (packed.status_code, error["code"], error["param"]) == (415, "unsupported_encoding", "Content-Encoding")
    assert packed.headers["Accept-Encoding"] == "identity"
    assert read.status_code == 200


async def test_a_permanent_refusal_forbids_retries(serve: Serve) -> None:
    """The OpenAI client sends a request that gets 501 only once, although it retries other statuses from 500 on."""
    options = {"max_retries": 3, "api_key": "data"}
    async with serve(TOKENS) as http, client_of(http).with_options(**options) as client:
        with pytest.raises(openai.InternalServerError, match="no model of the fleet embeds") as raised:
            await client.embeddings.create(model="synthetic", input="a")
        metrics = (await http.client.get("/metrics", headers={"Authorization": "Bearer data"})).text
    assert raised.value.response.headers["X-Should-Retry"] == "false"
    [count] = [line for line in metrics.splitlines() if "requests_total" in line and "/v1/embeddings" in line]
    assert count.endswith(" 1.0")


def test_only_permanent_refusals_forbid_retries() -> None:
    """A route that is not served and a request that kills engines are final. A busy service is not."""
    final = [HttpError(501, "", code="not_served"), HttpError(502, "", code="poison_request")]
    assert [error.headers for error in final] == [{"X-Should-Retry": "false"}] * 2
    assert all("X-Should-Retry" not in HttpError(status, "", code="busy").headers for status in (429, 502, 503, 504))


# Rules for all responses: the request id, and the timeout for clients that do not read.


LARGE = SyntheticConfig(num_layers=64, top_k=8, max_model_len=100_000)
"""Half a kilobyte of routed experts for each token."""
PROMPT = [7] * 25_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_cut_off(serve: Serve, stream: bool) -> None:
    """An unread response counts as in flight. After the timeout, it is cut, aborted and counted with status 408."""
    settings = Settings(max_in_flight=1, client_timeout_s=1.0)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 50_000 if stream else 1, "ignore_eos": True}}
    few = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    async with serve(settings, config=LARGE) as http, posted(http, PATH, {**body, "stream": stream}) as reader:
        assert b"200" in await reader.readline()
        busy = await http.client.post(PATH, json=few)
        labels = {"method": "POST", "route": PATH, "model": "synthetic"}
        await becomes(http, "rollbus_http_requests_total", 1, **labels, status="408")
        await until_idle(http.engine, http.rb)
        assert (await http.client.post(PATH, json=few)).status_code == 200
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(len(PROMPT) * 512)
    assert busy.status_code == 429


async def test_a_client_that_disconnects_during_a_response_is_counted(serve: Serve) -> None:
    """If the client disconnects during a response, the rest is not produced, and the metric counts status 499."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    async with serve(config=LARGE) as http:
        async with posted(http, PATH, body) as reader:
            assert b"200" in await reader.readline()
        labels = {"method": "POST", "route": PATH, "model": "synthetic"}
        await becomes(http, "rollbus_http_requests_total", 1, **labels, status="499")


async def test_a_slow_client_receives_the_whole_response(serve: Serve) -> None:
    """The timeout applies to each piece, so a slow client receives the whole response."""
    settings = Settings(client_timeout_s=0.5)
    body = {"token_ids": PROMPT[:20_000], "sampling_params": {"max_tokens": 1}}
    async with serve(settings, config=LARGE) as http:
        parts = []
        async with http.client.stream("POST", PATH, json=body) as stream:
            async for part in stream.aiter_raw():
                parts.append(part)
                await asyncio.sleep(0.001)
    routed = json.loads(b"".join(parts))["choices"][0]["routed_experts"]
    assert routed["shape"] == [20_000, 64, 8]


async def test_a_stream_that_is_not_read_holds_few_bytes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the log probabilities of a stream that is not read, few are held as JSON, even if many tokens come at once."""
    drain, is_waiting = edge.ResponseSender._drain, False

    async def note(sender: edge.ResponseSender) -> None:
        nonlocal is_waiting
        is_waiting = True
        await drain(sender)
        is_waiting = False

    monkeypatch.setattr(edge.ResponseSender, "_drain", note)
    # Each step of the engine gives the client 64 tokens, of which each event has 3 kB.
    sampling = {"n": 64, "max_tokens": 60, "logprobs": 20, "ignore_eos": True}
    config = SyntheticConfig(num_experts=0, max_num_seqs=65)
    tracemalloc.start()
    try:
        async with (
            serve(config=config) as http,
            posted(http, PATH, {"token_ids": [1], "stream": True, "sampling_params": sampling}),
        ):
            engine = http.engine
            await until_true(lambda: is_waiting and is_idle(engine))
            snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    found = snapshot.filter_traces([tracemalloc.Filter(True, f"*/frontend/http/{name}.py") for name in WRITING])
    held = sum(stat.size for stat in found.statistics("filename"))
    # One piece waits, and the rest is small. Without the limit, these events have 64 KiB three times.
    assert held < 2 * SEND_BYTES


async def test_a_body_that_does_not_arrive_gives_408(serve: Serve) -> None:
    """A body that does not arrive gives 408 and closes the connection."""
    async with (
        serve(Settings(client_timeout_s=0.3)) as http,
        connected(http.url, post_head(PATH, 10) + b"{") as (reader, _),
    ):
        head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "body_timeout"


async def test_every_response_has_a_request_id(serve: Serve, tmp_path: Path) -> None:
    """Each response has the client's request id if it is valid, or a new one, also for errors before a request."""
    settings = Settings(
        token="data", admin_token="admin", max_body_bytes=1000, tokenizer=save(make_byte_level(), tmp_path)
    )
    async with serve(settings) as http:

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


# Limits on requests of clients, and no work for clients that have disconnected.


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


async def becomes(http: Http, name: str, wanted: float, **labels: str) -> None:
    """Wait until a counter has a value."""
    while True:
        found = parse((await http.client.get("/metrics")).text)
        if found.get((name, frozenset(labels.items()))) == wanted:
            return
        await asyncio.sleep(0.02)


async def test_bodies_are_bounded(serve: Serve) -> None:
    """A body above the limit gives 413 on each route, if its length is declared and also if it is chunked."""
    async with serve(Settings(max_body_bytes=1000)) as http:

        async def chunked() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 500

        for method, path in (key for key, route in {**DATA, **ADMIN}.items() if route.body is not None):
            async with connected(http.url, post_head(path, 1001, method)) as (reader, _):
                assert (await reader.readline()).split()[1] == b"413", path
            answer = await http.client.request(method, path, content=chunked())
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large"), path
        assert (await http.client.get("/health")).status_code == 200


async def test_a_request_beyond_the_limit_gives_429(serve: Serve, tmp_path: Path) -> None:
    """On each route, a request beyond the limit gives 429 with Retry-After, until another request has ended."""
    settings = Settings(max_in_flight=1, tokenizer=save(make_byte_level(), tmp_path))
    async with serve(settings, config=SLOW) as http:
        for path, body in GENERATING.items():
            async with posted(http, path, {**body, "stream": True}) as reader:
                assert b"200" in await reader.readline()
                for stream in (False, True):
                    refused = await http.client.post(path, json={**body, "stream": stream})
                    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            await becomes(http, "rollbus_http_generations_in_flight", 0, model="synthetic")
        await until_idle(http.engine, http.rb)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_of_a_disconnected_client_is_aborted_and_counted(
    serve: Serve, tmp_path: Path, stream: bool
) -> None:
    """If a client disconnects, before or after the first token, its request is aborted in the engine and counted."""
    settings = Settings(tokenizer=save(make_byte_level(), tmp_path))
    async with serve(settings, config=SLOW) as http:
        engine, left = http.engine, {"model": "synthetic", "outcome": "left"}
        for number, (path, body) in enumerate(GENERATING.items()):
            async with posted(http, path, {**body, "stream": stream}) as reader:
                if stream:
                    await reader.readuntil(b"data: ")
                await until_true(lambda: not is_idle(engine))
            await becomes(http, "rollbus_http_generations_total", 2 * number + 1, **left)
            await until_idle(engine, http.rb)

            await http.rb.fleet.pause()
            async with posted(http, path, {**body, "stream": stream}):
                await becomes(http, "rollbus_http_generations_in_flight", 1, model="synthetic")
            await becomes(http, "rollbus_http_generations_total", 2 * number + 2, **left)
            await http.rb.fleet.resume()
            await until_idle(engine, http.rb)
            labels = {"method": "POST", "route": path, "model": "synthetic", "status": "499"}
            await becomes(http, "rollbus_http_requests_total", 2, **labels)


@pytest.mark.parametrize(("padding", "later"), [(4 * MAX_HEAD_BYTES, b""), (0, HEALTH + b"\r\n")])
async def test_a_disconnect_behind_a_long_body_or_a_further_request_is_noticed(
    serve: Serve, caplog: pytest.LogCaptureFixture, padding: int, later: bytes
) -> None:
    """Also after a body that fills the buffer for reading, and with a request that waits, the request is aborted."""
    body = json.dumps(GENERATING[PATH]).encode() + b" " * padding
    async with serve(config=SLOW) as http:
        engine = http.engine
        async with connected(http.url, post_head(PATH, len(body)) + body + later):
            await until_true(lambda: not is_idle(engine))
        labels = {"method": "POST", "route": PATH, "model": "synthetic", "status": "499"}
        await becomes(http, "rollbus_http_requests_total", 1, **labels)
        await until_idle(engine, http.rb)
    assert [record.getMessage() for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))] == []


# A service that stops while clients wait.


STOPPING_SLOW = SyntheticConfig(step_s=0.005)
STOPPING_LONG = {"token_ids": [1], "sampling_params": {"max_tokens": 60_000, "ignore_eos": True}}


async def test_a_stop_ends_waiting_requests_and_streams_and_keeps_commands(
    serve_fleet: Serve, one_worker: StartServed, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting requests get 503, streams are closed, and their requests aborted. A recorded command remains."""
    async with one_worker(config=STOPPING_SLOW) as (rb, _, engine):
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(timeout=SOON_S) as client:
            async with (
                serve_fleet(Settings(stop_timeout_s=0.2)) as http,
                in_flight(Http(http.url, http.client, rb, http.own)),
            ):
                await http.own.fleet.wait_for_workers()
                stream = await client.send(
                    client.build_request(
                        "POST", f"{http.url}/inference/v1/generate", json={**STOPPING_LONG, "stream": True}
                    ),
                    stream=True,
                )
                whole = tasks.create_task(client.post(f"{http.url}/inference/v1/generate", json=STOPPING_LONG))
                waiting = tasks.create_task(client.post(f"{http.url}/v1/rl/pause", json={"mode": "wait"}))
                while "pause" not in getattr((await rb.fleet.state()).desired.get("synthetic"), "registers", ()):
                    pass
            for answer in (await whole, await waiting):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
            with pytest.raises(httpx.HTTPError):
                await stream.aread()
        state = await rb.fleet.state()
        while state.workers[0].state is not WorkerState.PAUSED:
            state = await rb.fleet.state()
        await rb.fleet.resume()
        await until_idle(engine, rb)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_a_fault_of_the_service_is_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception gives 500 with an error body, and the service serves on."""

    async def fail(*_args: object, **_options: object) -> None:
        raise LookupError

    async with serve() as http:
        with monkeypatch.context() as patch:
            patch.setattr(rollbus.Client, "complete", fail)
            failed = await http.client.post(PATH, json=BODY)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert (await http.client.post(PATH, json=BODY)).status_code == 200
