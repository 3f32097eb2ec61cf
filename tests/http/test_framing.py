"""Compressed bodies, and the header that forbids retries."""

import gzip
import json

import openai
import pytest

from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.settings import Settings
from tests.http.openai_support import client_of
from tests.http.support import http_service
from tests.http.test_connections import BODY, PATH

TOKENS = Settings(token="data", admin_token="admin")


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
