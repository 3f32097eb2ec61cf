"""The framing of requests and answers: trailers, compressed bodies, HTTP/1.0, and the header that forbids retries."""

import gzip
import json

import openai
import pytest

from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.settings import Settings
from tests.http.openai_support import client_of
from tests.http.support import http_service
from tests.http.test_connections import BODY, PATH, connected, rest_of

TOKENS = Settings(token="data", admin_token="admin")
CHUNKED = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"


def chunked(path: str, headers: str, trailers: str, body: str = "{}") -> bytes:
    """Return a request whose chunked body ends with trailers."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{CHUNKED}{headers}\r\n"
    return f"{head}{len(body):x}\r\n{body}\r\n0\r\n{trailers}\r\n".encode()


async def test_trailers_are_no_headers(nats_url: str, fleet: str) -> None:
    """A token, an id or a second `Host` in the trailers of a body has no effect."""
    late = "Authorization: Bearer admin\r\nX-Request-Id: late\r\nHost: other\r\nExpect: 100-continue\r\n"
    close = "Connection: close\r\n"
    async with http_service(nats_url, fleet, TOKENS) as http:
        async with connected(http.url, chunked("/pause", close, late)) as (reader, _):
            refused = await rest_of(reader)
        async with connected(http.url, chunked("/pause", f"{close}Authorization: Bearer admin\r\n", late)) as (
            reader,
            _,
        ):
            applied = await rest_of(reader)
    assert refused.startswith(b"HTTP/1.1 401 ")
    assert applied.startswith(b"HTTP/1.1 200 ")
    assert b"late" not in refused + applied


async def test_headers_after_trailers_belong_to_the_next_request(nats_url: str, fleet: str) -> None:
    """On one connection, the headers of a request after trailers count again."""
    first = chunked("/pause", "", "Authorization: Bearer admin\r\n")
    second = b"GET /is_paused HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer data\r\nConnection: close\r\n\r\n"
    async with http_service(nats_url, fleet, TOKENS) as http, connected(http.url, first + second) as (reader, _):
        answers = await rest_of(reader)
    assert [status.split()[0] for status in answers.split(b"HTTP/1.1 ")[1:]] == [b"401", b"200"]
    assert answers.endswith(b'{"is_paused":false}')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(nats_url: str, fleet: str, stream: bool) -> None:
    """An answer without a length to HTTP/1.0 is not chunked and ends with the connection."""
    body = json.dumps({**BODY, "stream": stream})
    head = f"POST {PATH} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with http_service(nats_url, fleet) as http:
        async with connected(http.url, f"{head}{body}".encode()) as (reader, _):
            answer = await rest_of(reader)
        async with connected(http.url, b"GET /v1/models HTTP/1.0\r\n\r\n") as (reader, _):
            models = await rest_of(reader)
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    if stream:
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
    else:
        assert len(json.loads(content)["choices"][0]["token_ids"]) == 1
    assert json.loads(models.partition(b"\r\n\r\n")[2])["object"] == "list"


async def test_a_compressed_body_is_refused(nats_url: str, fleet: str) -> None:
    """A compressed body is 415 with the header's name. A body that is declared as not compressed is read."""
    plain = json.dumps(BODY).encode()
    async with http_service(nats_url, fleet) as http:
        post = http.client.post
        packed = await post(PATH, content=gzip.compress(plain), headers={"Content-Encoding": "gzip"})
        read = await post(PATH, content=plain, headers={"Content-Encoding": "Identity"})
    error = packed.json()["error"]
    assert (packed.status_code, error["code"], error["param"]) == (415, "unsupported_encoding", "Content-Encoding")
    assert packed.headers["Accept-Encoding"] == "identity"
    assert read.status_code == 200


async def test_a_permanent_refusal_forbids_retries(nats_url: str, fleet: str) -> None:
    """The OpenAI client sends a request that gets 501 only once, although it retries other statuses from 500 on."""
    options = {"max_retries": 3, "api_key": "data"}
    async with http_service(nats_url, fleet, TOKENS) as http, client_of(http).with_options(**options) as client:
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
