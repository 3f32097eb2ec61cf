"""Lists of requests and their timelines over HTTP, for admins, by request id or response id."""

import asyncio
from typing import Any

import pytest

from rollbus.frontend.http.settings import Settings
from rollbus.schemas.errors import RequestRejected
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import http_before, http_service
from tests.support.requests import endless, short
from tests.support.streams import start_stream

TOKENS = Settings(token="data", admin_token="admin")


async def test_an_admin_sees_a_request(nats_url: str, fleet: str) -> None:
    """With the admin token, the route returns the complete timeline and its worker, for any client.

    The data token is refused.
    """
    async with http_service(nats_url, fleet, settings=TOKENS) as http:
        await http.rb.complete(short("r"))
        path = "/v1/rl/requests/r"
        told = await http.client.get(path, headers={"Authorization": "Bearer admin"})
        refused = [await http.client.get(path, headers=given) for given in ({}, {"Authorization": "Bearer data"})]
        (worker,) = http.rb.fleet.workers

    body = told.json()
    [timeline] = body.pop("timelines")
    assert body == {
        "request_id": "r",
        "workers_asked": 1,
        "workers_answered": 1,
        "silent": [],
        "left_out": 0,
        "clock_skews": {},
    }
    assert (timeline["worker"], timeline["incarnation"]) == (worker.worker, worker.incarnation)
    assert (timeline["attempt"], timeline["child"], timeline["traceparent"]) == (0, 0, None)
    assert [event["event"] for event in timeline["events"]][-3:] == ["prefilled", "first_token", "ended"]
    assert timeline["events"][-1] == {
        "at": timeline["events"][-1]["at"], "event": "ended", "tokens": 3, "reason": "length",
    }  # fmt: skip
    assert [answer.status_code for answer in refused] == [401, 401]
    assert all("timelines" not in answer.text for answer in refused)


async def test_the_route_accepts_the_ids_of_responses(nats_url: str, fleet: str) -> None:
    """The route accepts the id in the header and the prefixed id of an OpenAI response."""
    body = {"model": "synthetic", "prompt": [1, 2, 3], "max_tokens": 2, "detokenize": False}
    async with http_service(nats_url, fleet) as http:
        answer = await http.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        named = await http.client.get(f"/v1/rl/requests/{answer.headers['x-request-id']}")
        prefixed = await http.client.get(f"/v1/rl/requests/{answer.json()['id']}")

    assert answer.json()["id"] == "cmpl-mine"
    assert named.json() == prefixed.json()
    assert named.json()["request_id"] == "mine"


@pytest.mark.parametrize("name", ["unknown", "x" * 128])
async def test_a_request_that_no_worker_knows_is_404(nats_url: str, fleet: str, name: str) -> None:
    """An unknown request gives 404 with the number of workers asked, and how many requests they remember."""
    async with http_service(nats_url, fleet) as http:
        answer = await http.client.get(f"/v1/rl/requests/{name}")

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "unknown_request", "id")
    assert "unknown to 1 of 1 workers" in error["message"]
    assert "the last 1,000 that ended" in error["message"]


@pytest.mark.parametrize("name", ["%20a", "x" * 513, "%00", "%E2%80%AE", "%C2%A0"])
async def test_hostile_ids_are_refused(nats_url: str, fleet: str, name: str) -> None:
    """An invalid id gives 400 with the field, before any worker is asked."""
    async with http_service(nats_url, fleet) as http:
        answer = await http.client.get(f"/v1/rl/requests/{name}")

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "id")


LIST = "/v1/rl/request_list"
SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)


async def test_an_admin_lists_requests(nats_url: str, fleet: str) -> None:
    """With the admin token, the route returns each list, filtered by client, model and workers.

    The data token is refused.
    """
    async with (
        http_service(nats_url, fleet, settings=TOKENS, config=SLOW) as http,
        asyncio.TaskGroup() as tasks,
    ):
        with pytest.raises(RequestRejected):
            await http.rb.complete(short("wrong", lora="missing"))
        stream = await start_stream(tasks, http.rb, endless("a request / 1"))
        (worker,) = http.rb.fleet.workers

        async def read(**query: str) -> dict[str, Any]:
            answer = await http.client.get(LIST, params=query, headers={"Authorization": "Bearer admin"})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        running = await read()
        [timeline] = running.pop("timelines")
        both = {"client": timeline["client"], "model": worker.model, "workers": worker.worker}
        others = [
            await read(show="slowest", **both),
            await read(show="failed", limit="1"),
            await read(show="resumed"),
            await read(client="nobody"),
        ]
        refused = [await http.client.get(LIST, headers=given) for given in ({}, {"Authorization": "Bearer data"})]
        await http.rb.fleet.abort(["a request / 1"])
        await stream.reading

    assert running == {"workers_asked": 1, "workers_answered": 1, "silent": {}, "left_out": 0}
    assert (timeline["given_id"], timeline["worker"]) == ("a request / 1", worker.worker)
    assert timeline["progress"]["tokens"] > 0
    found = [[each["given_id"] or each["request_id"] for each in listed["timelines"]] for listed in others]
    assert found == [["a request / 1"], ["wrong"], [], []]
    assert [answer.status_code for answer in refused] == [401, 401]
    assert all("timelines" not in answer.text for answer in refused)


WRONG = {
    "show": ("show=fastest", "show=running&show=failed"),
    "limit": ("limit=0", "limit=257", "limit=x"),
    "client": ("client=a.b", "client=a&client=b"),
    "workers": ("workers=gone", "workers=*", "workers=w&workers=w"),
    "model": ("model=",),
    "id": ("id=r",),
}


async def test_a_wrong_list_is_refused(nats_url: str, fleet: str) -> None:
    """A wrong filter gives 400 with its name."""
    async with http_service(nats_url, fleet) as http:
        for param, queries in WRONG.items():
            for query in queries:
                answer = await http.client.get(f"{LIST}?{query}")
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param), error


async def test_a_list_without_workers_is_503(nats_url: str, fleet: str) -> None:
    """Without workers, there is nobody to ask: 503."""
    async with http_before(nats_url, fleet) as http:
        answer = await http.client.get(LIST)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
