"""The model of HTTP requests that name none, and the errors for models that no worker serves."""

from typing import Any

import httpx

from rollbus.bus.control.updates import provision
from rollbus.bus.nats.server import Server
from rollbus.frontend.http.settings import Settings
from rollbus.schemas.errors import ErrorCode
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.waits import until_true

BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    """Return status, code and message of an error."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Send a request for tokens."""
    return await client.post("/inference/v1/generate", json=BODY | fields)


async def test_without_a_model_the_only_known_model_answers(nats_url: str, fleet: str) -> None:
    """Without a model, or with an empty name, the only known model answers. With several, the error lists them.

    The service remembers nothing: a second model that joins ends the choice, although its workers leave again.
    """
    async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"), http_before(nats_url, fleet) as http:
        await http.own.fleet.wait_for_workers()
        for fields in ({}, {"model": ""}, {"model": None}):
            answer = await ask(http.client, **fields)
            assert (answer.status_code, answer.json()["model"], answer.json()["lora"]) == (200, "a", None)
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await http.own.fleet.wait_for_workers(model="b")
            for fields in ({}, {"model": ""}):
                status, code, message = error_of(await ask(http.client, **fields))
                assert (status, code) == (400, ErrorCode.INVALID_REQUEST)
                assert message.startswith("model is missing; allowed: a, b;")
        assert error_of(await ask(http.client))[0] == 400
        assert (await ask(http.client, model="a")).json()["model"] == "a"
        status, code, message = error_of(await ask(http.client, model="b"))
        assert (status, code, message) == (503, ErrorCode.NO_WORKERS, "model 'b' has no workers")
        status, code, message = error_of(await ask(http.client, model="c"))
        assert (status, code, message) == (404, ErrorCode.UNKNOWN_MODEL, "model 'c' is unknown; allowed: a, b")


async def test_a_request_never_gets_the_tokens_of_another_model(nats_url: str, fleet: str) -> None:
    """If the workers of one of two models are gone, a request without a model is rejected."""
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, model="b"), http_before(nats_url, fleet) as http:
        await http.own.fleet.wait_for_workers()
        assert error_of(await ask(http.client))[:2] == (400, ErrorCode.INVALID_REQUEST)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert error_of(await http.client.post("/v1/chat/completions", json=chat))[0] == 400


async def test_the_default_model_answers_requests_without_a_name(nats_url: str, fleet: str) -> None:
    """With `--default-model`, a request without a name goes to that model, whatever other models the fleet has."""
    settings = Settings(default_model="b")
    async with (
        synthetic_worker(nats_url, fleet, worker_id="wa", model="a"),
        http_before(nats_url, fleet, settings) as http,
    ):
        await http.own.fleet.wait_for_workers()
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await http.own.fleet.wait_for_workers(model="b")
            answer = await ask(http.client)
            assert (answer.status_code, answer.json()["model"]) == (200, "b")
        await until_true(lambda: len(http.own.fleet.workers) == 1)
        assert error_of(await ask(http.client))[0] == 503


async def test_an_empty_default_model_is_none(nats_url: str, fleet: str) -> None:
    """`--default-model ""`, as from an unset variable of a shell, is no name of a model."""
    settings = Settings(default_model="")
    async with synthetic_worker(nats_url, fleet, model="a"), http_before(nats_url, fleet, settings) as http:
        await http.own.fleet.wait_for_workers()
        assert (await ask(http.client)).status_code == 200


async def test_a_stream_names_its_model_in_each_event(nats_url: str, fleet: str) -> None:
    """Each event of a stream names the model."""
    async with synthetic_worker(nats_url, fleet, model="a"), http_before(nats_url, fleet) as http:
        await http.own.fleet.wait_for_workers()
        answer = await ask(http.client, stream=True)
        events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        assert events
        assert all('"model":"a"' in event for event in events)
