"""Ids over HTTP: kept as they came, separate for each user, and refused by name where they cannot be kept."""

import asyncio

import pytest

from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import http_service
from tests.support.fleet_states import until_state

PATH = "/inference/v1/generate"
SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)
FEW = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
CHAT = {"model": "synthetic", "prompt": [[1, 2], [3]], "max_tokens": 1, "detokenize": False}


@pytest.mark.parametrize("name", ["gsm8k/test.1", "a=b c", "x:y", ".", "..", "r" * 512])
async def test_ids_of_header_and_body_are_kept(nats_url: str, fleet: str, name: str) -> None:
    """Each printable id of header or body is that of the answer, and the history is found by it."""
    async with http_service(nats_url, fleet) as http:
        by_header = await http.client.post(PATH, json=FEW, headers={"X-Request-Id": name})
        by_body = await http.client.post(PATH, json={**FEW, "request_id": name})
        several = await http.client.post("/v1/completions", json=CHAT, headers={"X-Request-Id": name})
        history = await http.client.get("/v1/rl/requests", params={"id": name})

    for answer in (by_header, by_body):
        assert (answer.status_code, answer.json()["request_id"], answer.headers["X-Request-Id"]) == (200, name, name)
    assert (several.status_code, several.json()["id"]) == (200, f"cmpl-{name}")
    assert history.json()["request_id"] == name
    assert {each["given_id"] for each in history.json()["timelines"]} == {name}


async def test_an_id_that_no_header_carries_is_only_in_the_body(nats_url: str, fleet: str) -> None:
    """An id outside ASCII is kept in the body of the answer, without the header; in a request's header it is 400."""
    async with http_service(nats_url, fleet) as http:
        kept = await http.client.post(PATH, json={**FEW, "request_id": "日本"})
        other = await http.client.post(PATH, json=FEW, headers={b"X-Request-Id": "é".encode("latin-1")})
        unprintable = await http.client.post(PATH, json=FEW, headers={"X-Request-Id": "a\tb"})
        long = await http.client.post(PATH, json={**FEW, "request_id": "r" * 513})
        empty = await http.client.post(PATH, json=FEW, headers={"X-Request-Id": ""})

    assert kept.json()["request_id"] == "日本"
    assert "X-Request-Id" not in kept.headers
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in (other, unprintable, long)] == [
        (400, "X-Request-Id"),
        (400, "X-Request-Id"),
        (400, "request_id"),
    ]
    assert empty.status_code == 200


async def test_equal_ids_of_two_users_never_meet(nats_url: str, fleet: str) -> None:
    """A request of one user is no double of another user's with the same id; one user's second is 409."""
    settings = Settings(token="data", admin_token="admin")
    users = [{"Authorization": f"Bearer {token}", "X-Request-Id": "1"} for token in ("data", "admin")]
    endless = {"token_ids": [1], "sampling_params": {"ignore_eos": True, "max_tokens": 1_000_000}, "stream": True}
    async with http_service(nats_url, fleet, settings=settings, config=SLOW) as http:
        async with http.client.stream("POST", PATH, json=endless, headers=users[0]) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            other, double = [await http.client.post(PATH, json=FEW, headers=user) for user in reversed(users)]
        await until_state(http.own, lambda state: not any(worker.in_flight for worker in state.workers))
        again = await http.client.post(PATH, json=FEW, headers=users[0])

    assert (other.status_code, other.json()["request_id"]) == (200, "1")
    assert (double.status_code, double.json()["error"]["code"]) == (409, "duplicate_request")
    assert (again.status_code, again.json()["request_id"]) == (200, "1")


async def test_an_admin_aborts_by_the_id_that_a_user_chose(nats_url: str, fleet: str) -> None:
    """`/abort_requests` finds the request of any user by the id in header or answer."""
    endless = {"token_ids": [1], "sampling_params": {"ignore_eos": True, "max_tokens": 1_000_000}, "request_id": "a/b"}
    async with http_service(nats_url, fleet, config=SLOW) as http, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(http.client.post(PATH, json=endless))
        await until_state(http.own, lambda state: any(worker.in_flight for worker in state.workers))
        aborted = await http.client.post("/v1/rl/abort_requests", json={"request_ids": ["chatcmpl-a/b"]})
        answer = await asked

    assert aborted.json()["aborted"] == 1
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
