"""More names of vLLM and prime-rl: abort by request id, sleep and wake, and routes that are not served."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import rollbus
from rollbus.frontend.http.control import DATA_ROUTES, NOT_SERVED_ROUTES
from rollbus.frontend.http.service import Service
from rollbus.frontend.http.settings import Settings
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.control_support import control_http
from tests.http.openai_support import CHAT, CONFIG, talking
from tests.http.small_tokenizers import make_byte_level, save
from tests.http.support import http_service
from tests.http.test_safety import GENERATING, SLOW
from tests.support.fleet import until_idle
from tests.support.waits import until

GENERATE = "/inference/v1/generate"
RESOLVES_S = 0.3
"""Seconds for which requests resolve their model after an abort."""
ENDLESS = rollbus.SamplingParams(max_tokens=10_000, ignore_eos=True)


async def test_requests_are_aborted_by_their_ids(nats_url: str, fleet: str) -> None:
    """The route of vLLM aborts requests of any client and counts them.

    Only rollbus's route gives 404 for an ended request.
    """
    async with http_service(nats_url, fleet, config=SyntheticConfig(step_s=0.01)) as http:
        body = {**GENERATING[GENERATE], "stream": True, "request_id": "mine"}
        async with http.client.stream("POST", GENERATE, json=body) as stream:
            lines = aiter(stream.aiter_lines())
            await anext(lines)
            # A response of the OpenAI routes would have this id.
            ended = await http.client.post("/abort_requests", json={"request_ids": ["chatcmpl-mine", "other"]})
            assert ended.status_code == 200, ended.text
            *_, last, _, done, _ = [line async for line in lines]
        assert http.engine is not None
        await until_idle(http.engine, http.rb)
        again = await http.client.post("/abort_requests", params={"request_ids": ["mine", "other"]})
        ours = await http.client.post("/v1/rl/abort", json={"request_ids": ["mine"]})
        without = await http.client.post("/v1/rl/abort", json={})
    assert ('"finish_reason":"abort"' in last, done) == (True, "data: [DONE]")
    assert (ended.status_code, ended.json()["status"], ended.json()["aborted"]) == (200, "aborted", 1)
    assert (again.status_code, again.json()["aborted"], again.json()["not_found"]) == (200, 0, ["mine", "other"])
    assert (ours.status_code, ours.json()["error"]["code"]) == (404, "not_found")
    assert (without.status_code, without.json()["error"]["param"]) == (400, "request_ids")


async def test_all_requests_are_aborted(nats_url: str, fleet: str) -> None:
    """Without ids, vLLM's route aborts the requests of this service, also those that wait, and of other clients."""
    config = SyntheticConfig(step_s=0.01, max_num_seqs=2)
    settings = Settings(token="data", admin_token="admin")
    admin = {"Authorization": "Bearer admin"}
    body = GENERATING[GENERATE]
    async with http_service(nats_url, fleet, settings, config=config) as http:
        stream = http.rb.generate(request := rollbus.GenerateRequest(prompt_token_ids=[5], sampling=ENDLESS))
        await anext(stream)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(http.client.post(GENERATE, json=body, headers=admin)) for _ in range(30)]

            async def load() -> object:
                return (await http.client.get("/load", headers=admin)).json()["server_load"]

            await until(load, len(asked))
            refused = await http.client.post("/abort_requests", json={}, headers={"Authorization": "Bearer data"})
            answer = await http.client.post("/abort_requests", json={}, headers=admin)
        *_, last = [chunk async for chunk in stream]
        left = await load()
    assert refused.status_code == 401
    assert (answer.status_code, answer.json()["aborted"]) == (200, len(asked) + 1), answer.text
    assert {task.result().json()["choices"][0]["finish_reason"] for task in asked} == {"abort"}
    assert last.finish_reason is rollbus.FinishReason.ABORT
    assert request.request_id == last.request_id
    assert left == 0


@pytest.mark.parametrize("body", [{}, {"model": "synthetic"}])
async def test_requests_without_a_known_model_yet_are_aborted(
    nats_url: str, fleet: str, tmp_path: Path, body: dict[str, Any]
) -> None:
    """An abort of all requests includes those that still resolve their model, on each route, streamed or not."""
    gate = asyncio.Event()
    known_models, abort_open = rollbus.Fleet.known_models, Service.abort_open

    async def known_late(self: rollbus.Fleet) -> tuple[str, ...]:
        await gate.wait()
        return await known_models(self)

    async def abort(self: Service, model: str | None, ids: tuple[str, ...] | None) -> dict[str, str]:
        # Long enough that an abort that does not wait has ended before.
        asyncio.get_running_loop().call_later(RESOLVES_S, gate.set)
        return await abort_open(self, model, ids)

    settings = Settings(tokenizer=save(make_byte_level(), tmp_path))
    async with http_service(nats_url, fleet, settings, config=SLOW) as http:

        async def last_reason(path: str, *, stream: bool) -> str | None:
            answer = await http.client.post(path, json={**GENERATING[path], "model": None, "stream": stream})
            text = answer.text.split("data: ")[-2] if stream else answer.text
            return str(json.loads(text)["choices"][0]["finish_reason"])

        async def load() -> object:
            return (await http.client.get("/load")).json()["server_load"]

        with (
            mock.patch.object(rollbus.Fleet, "known_models", known_late),
            mock.patch.object(Service, "abort_open", abort),
        ):
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(last_reason(path, stream=stream))
                    for path in GENERATING
                    for stream in (False, True)
                ]
                await until(load, len(asked))
                answer = await http.client.post("/abort_requests", json=body)
    assert answer.json()["aborted"] == len(asked), answer.text
    assert [task.result() for task in asked] == ["abort"] * len(asked)


async def test_engines_sleep_and_wake(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`sleep` and `wake_up` accept vLLM's query parameters. They reject those with another effect and name them."""
    async with control_http(nats_url, fleet, tmp_path) as c:
        client = c.http.client
        answers = [
            await client.post("/sleep", params={"level": "1"}),
            await c.told("/is_sleeping", WorkerState.ASLEEP),
            await client.post("/wake_up"),
            await c.told("/is_sleeping", WorkerState.SERVING),
            await client.post("/sleep"),
            await client.post("/wake_up", params={"tags": ["weights"]}),
            await client.post("/wake_up", params={"tags": ["kv_cache"]}),
            await c.told("/is_sleeping", WorkerState.SERVING),
        ]
        wrong = [
            await client.post("/sleep", params={"level": "0"}),
            await client.post("/sleep", params={"mode": "wait"}),
            await client.post("/wake_up", params={"tags": ["weights", "kv"]}),
        ]
        state = await c.http.rb.fleet.state()
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    assert [answers[i].json()["is_sleeping"] for i in (1, 3, 7)] == [True, False, False]
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in wrong] == [
        (400, "level"),
        (400, "mode"),
        (400, "tags[1]"),
    ]
    assert state.workers[0].state is WorkerState.SERVING


async def test_a_known_route_that_is_not_served_names_a_served_route(nats_url: str, fleet: str) -> None:
    """A known route that is not served gives 501 and names a served route. The client of prime-rl ignores 404."""
    async with http_service(nats_url, fleet) as http:
        served = set((await http.client.get("/openapi.json")).json()["paths"])
        for method, path in {**NOT_SERVED_ROUTES, **DATA_ROUTES}:
            answer = await http.client.request(method, path, json={"new_version": "7"} if method == "POST" else None)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (501, "not_served")
            instead = error["message"].partition(":")[2]
            assert any(other in instead for other in served - {path}), error


async def test_the_token_route_of_prime_rl_equals_the_chat_route(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """prime-rl's token route equals the chat route with the token ids of the prompt in `tokens`."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3, "seed": 1}
    async with talking(nats_url, fleet, tmp_path, CONFIG) as (http, _):
        body = {**asked, "tokens": [5, 6, 7], "return_token_ids": True}
        answer = (await http.client.post(f"{CHAT}/tokens", json=body)).json()
        sampling = rollbus.SamplingParams(max_tokens=3, seed=1)
        direct = await http.rb.complete(rollbus.GenerateRequest(prompt_token_ids=[5, 6, 7], sampling=sampling))
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["choices"][0]["token_ids"] == direct.token_ids.tolist()
