"""The model of HTTP requests that name none, and the errors for models that no worker serves."""

import asyncio
from typing import Any

import httpx
import pytest

from rollbus.bus.control.updates import provision
from rollbus.bus.nats.server import Server
from rollbus.frontend.http import Settings
from rollbus.schemas.errors import ErrorCode, RequestRejected
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Serve, noted_requests
from tests.support.fleet import synthetic_worker, until_state
from tests.support.requests import endless, short, start_stream
from tests.support.waits import until_true

BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    """Return status, code and message of an error."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Send a request for tokens."""
    return await client.post("/inference/v1/generate", json=BODY | fields)


async def test_without_a_model_the_only_known_model_answers(serve_fleet: Serve, nats_url: str, fleet: str) -> None:
    """Without a model, or with an empty name, the only known model answers. With several, the error lists them.

    An empty `--default-model`, as from an unset variable of a shell, is no name. The service remembers nothing: a
    second model that joins ends the choice, although its workers leave again.
    """
    async with (
        synthetic_worker(nats_url, fleet, worker_id="wa", model="a"),
        serve_fleet(Settings(default_model="")) as http,
    ):
        await http.own.fleet.wait_for_workers()
        for fields in ({}, {"model": ""}, {"model": None}):
            answer = await ask(http.client, **fields)
            assert (answer.status_code, answer.json()["model"], answer.json()["lora"]) == (200, "a", None)
        streamed = (await ask(http.client, stream=True)).text.splitlines()
        assert {'"model":"a"' in event for event in streamed if event.startswith("data: {")} == {True}
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


async def test_a_request_never_gets_the_tokens_of_another_model(serve_fleet: Serve, nats_url: str, fleet: str) -> None:
    """If the workers of one of two models are gone, a request without a model is rejected."""
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, model="b"), serve_fleet() as http:
        await http.own.fleet.wait_for_workers()
        assert error_of(await ask(http.client))[:2] == (400, ErrorCode.INVALID_REQUEST)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert error_of(await http.client.post("/v1/chat/completions", json=chat))[0] == 400


async def test_the_default_model_answers_requests_without_a_name(serve_fleet: Serve, nats_url: str, fleet: str) -> None:
    """With `--default-model`, a request without a name goes to that model, whatever other models the fleet has."""
    settings = Settings(default_model="b")
    async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"), serve_fleet(settings) as http:
        await http.own.fleet.wait_for_workers()
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await http.own.fleet.wait_for_workers(model="b")
            answer = await ask(http.client)
            assert (answer.status_code, answer.json()["model"]) == (200, "b")
        await until_true(lambda: len(http.own.fleet.workers) == 1)
        assert error_of(await ask(http.client))[0] == 503


# Ids over HTTP: kept as they came, separate for each user, and refused by name where they cannot be kept.


PATH = "/inference/v1/generate"
SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)
FEW = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
CHAT = {"model": "synthetic", "prompt": [[1, 2], [3]], "max_tokens": 1, "detokenize": False}


async def test_ids_of_header_and_body_are_kept(serve: Serve) -> None:
    """Each printable id of header or body is that of the answer, and the history is found by it."""
    async with serve() as http:
        for name in ("gsm8k/test.1", "a=b c", "x:y", ".", "..", "r" * 512):
            by_header = await http.client.post(PATH, json=FEW, headers={"X-Request-Id": name})
            by_body = await http.client.post(PATH, json={**FEW, "request_id": name})
            both = await http.client.post(PATH, json={**FEW, "request_id": "other"}, headers={"X-Request-Id": name})
            several = await http.client.post("/v1/completions", json=CHAT, headers={"X-Request-Id": name})
            history = await http.client.get("/v1/rl/requests", params={"id": name})
            for answer in (by_header, by_body, both):
                found = (answer.status_code, answer.json()["request_id"], answer.headers["X-Request-Id"])
                assert found == (200, name, name)
            assert (several.status_code, several.json()["id"]) == (200, f"cmpl-{name}")
            assert history.json()["request_id"] == name
            assert {each["given_id"] for each in history.json()["timelines"]} == {name}
        prefixed = await http.client.get("/v1/rl/requests/cmpl-x:y")
        assert prefixed.json()["request_id"] == "x:y"


async def test_an_id_that_no_header_carries_is_only_in_the_body(serve: Serve) -> None:
    """An id outside ASCII is kept in the body of the answer, without the header; in a request's header it is 400."""
    async with serve() as http:
        kept = await http.client.post(PATH, json={**FEW, "request_id": "日本"})
        other = await http.client.post(PATH, json=FEW, headers={b"X-Request-Id": "é".encode("latin-1")})
        unprintable = await http.client.post(PATH, json=FEW, headers={"X-Request-Id": "a\tb"})
        long = await http.client.post(PATH, json={**FEW, "request_id": "r" * 513})
        empty = await http.client.post(PATH, json={**FEW, "request_id": "a"}, headers={"X-Request-Id": ""})
        drawn = [await http.client.post(PATH, json=FEW, headers={"X-Request-Id": ""}) for _ in range(2)]

    assert kept.json()["request_id"] == "日本"
    assert "X-Request-Id" not in kept.headers
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in (other, unprintable, long)] == [
        (400, "X-Request-Id"),
        (400, "X-Request-Id"),
        (400, "request_id"),
    ]
    assert (empty.json()["request_id"], empty.headers["X-Request-Id"]) == ("a", "a")
    assert len({answer.headers["X-Request-Id"] for answer in drawn}) == 2


async def test_equal_ids_of_two_users_never_meet(serve: Serve) -> None:
    """A request of one user is no double of another user's with the same id; one user's second is 409."""
    settings = Settings(token="data", admin_token="admin")
    users = [{"Authorization": f"Bearer {token}", "X-Request-Id": "1"} for token in ("data", "admin")]
    endless = {"token_ids": [1], "sampling_params": {"ignore_eos": True, "max_tokens": 1_000_000}, "stream": True}
    async with serve(settings=settings, config=SLOW) as http:
        async with http.client.stream("POST", PATH, json=endless, headers=users[0]) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            other, double = [await http.client.post(PATH, json=FEW, headers=user) for user in reversed(users)]
        await until_state(http.own, lambda state: not any(worker.in_flight for worker in state.workers))
        again = await http.client.post(PATH, json=FEW, headers=users[0])

    assert (other.status_code, other.json()["request_id"]) == (200, "1")
    assert (double.status_code, double.json()["error"]["code"]) == (409, "duplicate_request")
    assert double.headers["X-Request-Id"] == "1"
    assert (again.status_code, again.json()["request_id"]) == (200, "1")


# Session and group names over HTTP are separate for each user, because all users share the service's client.


async def test_users_do_not_share_sessions_and_groups(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal session and group names of two users differ on the bus, and those of one user stay equal.

    The error for a long name has its length in the request, not that on the bus.
    """
    wanted = noted_requests(monkeypatch)
    async with serve() as http:

        async def ask(address: str, session: str, group: str) -> tuple[str, str]:
            """Return the names on the bus."""
            headers = {"X-Session-ID": session, "X-Group-ID": group, "X-Forwarded-For": address}
            answer: httpx.Response = await http.client.post(PATH, json=FEW, headers=headers)
            assert answer.status_code == 200, answer.text
            request = wanted.pop()
            assert request.session_id is not None
            assert request.group_id is not None
            return request.session_id, request.group_id

        first = await ask("192.0.2.1", "s", "g")
        assert await ask("192.0.2.1", "s", "g") == first
        # Another user, and other names of the same user. No name on the bus equals any other name.
        names = [*first, *await ask("192.0.2.2", "s", "g"), *await ask("192.0.2.1", "s2", "g2"), "s", "g"]
        assert len(set(names)) == len(names)
        for header in ("X-Session-ID", "X-Group-ID"):
            refused = await http.client.post(PATH, json=FEW, headers={header: "x" * 10_000})
            assert (refused.status_code, "10000 characters" in refused.text) == (400, True)


# Lists of requests and their timelines over HTTP, for admins, by request id or response id.


TOKENS = Settings(token="data", admin_token="admin")


async def test_an_admin_sees_a_request(serve: Serve) -> None:
    """With the admin token, the route returns the complete timeline and its worker, for any client.

    The data token is refused.
    """
    async with serve(settings=TOKENS) as http:
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
        "waiting": NOTHING_WAITS,
    }
    assert (timeline["worker"], timeline["incarnation"]) == (worker.worker, worker.incarnation)
    assert (timeline["attempt"], timeline["child"], timeline["traceparent"]) == (0, 0, None)
    assert [event["event"] for event in timeline["events"]][-3:] == ["prefilled", "first_token", "ended"]
    assert timeline["events"][-1] == {
        "at": timeline["events"][-1]["at"], "event": "ended", "tokens": 3, "reason": "length",
    }  # fmt: skip
    assert [answer.status_code for answer in refused] == [401, 401]
    assert all("timelines" not in answer.text for answer in refused)


NOTHING_WAITS: dict[str, Any] = {"requests": [], "left_out": 0, "silent": []}
HOSTILE = ("%20a", "x" * 513, "%00", "%E2%80%AE", "%C2%A0")


async def test_unknown_and_hostile_ids_are_refused(serve: Serve) -> None:
    """An unknown request gives 404 with the number of workers asked, and how many requests they remember.

    An invalid id gives 400 with the field, before any worker is asked.
    """
    async with serve() as http:
        unknown = [await http.client.get(f"/v1/rl/requests/{name}") for name in ("unknown", "x" * 128)]
        hostile = [await http.client.get(f"/v1/rl/requests/{name}") for name in HOSTILE]

    for answer in unknown:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "unknown_request", "id")
        assert "unknown to 1 of 1 workers" in error["message"]
        assert "the last 1,000 that ended" in error["message"]
    for answer in hostile:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "id")


LIST = "/v1/rl/request_list"


async def test_an_admin_lists_requests(serve: Serve) -> None:
    """With the admin token, the route returns each list, filtered by client, model and workers.

    The data token is refused.
    """
    async with serve(settings=TOKENS, config=SLOW) as http, asyncio.TaskGroup() as tasks:
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

    assert running.pop("waiting") == NOTHING_WAITS
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


async def test_a_wrong_list_is_refused(serve: Serve) -> None:
    """A wrong filter gives 400 with its name."""
    async with serve() as http:
        for param, queries in WRONG.items():
            for query in queries:
                answer = await http.client.get(f"{LIST}?{query}")
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param), error
