"""HTTP requests wait a limited time for a worker that comes."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from rollbus.frontend.http.errors import without_paths
from rollbus.frontend.http.settings import Settings
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.bus.test_waiting import announcing
from tests.http.support import Http, http_before, http_service
from tests.http.test_models import BODY, error_of
from tests.http.test_safety import GENERATING
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S, busy_timeout, patient
from tests.support.presences import capabilities
from tests.support.waits import until, until_true

COUNT = 50


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Send a request for tokens to the synthetic model."""
    return await client.post("/inference/v1/generate", json={"model": "synthetic", **BODY, **fields})


async def is_known(http: Http) -> None:
    """Wait until the service has received the presence of a worker."""
    await until_true(lambda: http.own.fleet.workers)


async def test_requests_wait_for_a_worker_that_starts(nats_url: str, fleet: str) -> None:
    """Requests with and without a stream wait for the only worker to start, and are answered whole."""
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await announce(incarnation="1")
        await is_known(http)
        waiting = [tasks.create_task(ask(http.client, stream=bool(i % 2))) for i in range(COUNT)]
        _, pending = await asyncio.wait(waiting, timeout=1.0)
        assert len(pending) == COUNT
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            answers = [await task for task in waiting]

    assert [answer.status_code for answer in answers] == [200] * COUNT
    assert sum(answer.text.count("data: [DONE]") for answer in answers) == COUNT / 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.PAUSED])
async def test_after_the_limit_a_waiting_request_gives_503(
    nats_url: str, fleet: str, state: WorkerState, *, stream: bool
) -> None:
    """Without a first byte within `max_wait_s`, the answer is 503 with `Retry-After`, and says what it waited for.

    This also holds for requests beyond the number that the service hands to the fleet.
    """
    settings = Settings(max_wait_s=0.6)
    if state is WorkerState.PAUSED:
        async with http_service(nats_url, fleet, settings) as http:
            await http.rb.fleet.pause(mode="keep")
            await until_true(lambda: http.own.fleet.workers[0].state is state)
            answers = [await ask(http.client, stream=stream)]
    else:
        async with announcing(nats_url, fleet) as announce, http_before(nats_url, fleet, settings) as http:
            await announce(last_error="restart 3 of 5 in 8 s")
            await is_known(http)
            answers = [await ask(http.client, stream=stream)]

    for answer in answers:
        status, code, message = error_of(answer)
        assert (status, code) == (503, ErrorCode.NO_WORKERS)
        assert int(answer.headers["Retry-After"]) > 0
        assert "0.6 s" in message
        assert f"is {state}" in message


async def test_the_wait_for_a_start_counts_in_the_timeout_of_a_request(nats_url: str, fleet: str) -> None:
    """A request whose timeout is shorter than `max_wait_s` gets 504 when it has passed."""
    async with announcing(nats_url, fleet) as announce, http_before(nats_url, fleet) as http:
        await announce()
        await is_known(http)
        in_body = await ask(http.client, timeout_s=0.3)
        in_header = await http.client.post("/inference/v1/generate", json=BODY, headers={"X-Request-Timeout": "0.3"})

    assert [error_of(answer)[:2] for answer in (in_body, in_header)] == [(504, ErrorCode.TIMEOUT)] * 2


async def test_a_flood_of_waiting_requests_ends_together(nats_url: str, fleet: str) -> None:
    """Requests that wait for their turn behind others have the same limit, counted from their arrival."""
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet, Settings(max_wait_s=3.0, max_in_flight=4 * COUNT)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await announce(state=WorkerState.PAUSED, start_left_s=None, capabilities=capabilities(max_num_seqs=1))
        await is_known(http)
        waiting = [tasks.create_task(ask(http.client)) for _ in range(4 * COUNT)]
        # If each group of nine requests waited for its own time, this would take more than a minute.
        async with busy_timeout(patient(30)):
            answers = [await task for task in waiting]

    assert {error_of(answer)[:2] for answer in answers} == {(503, ErrorCode.NO_WORKERS)}


async def test_waiting_requests_count_in_the_limits_of_their_user(nats_url: str, fleet: str) -> None:
    """A request that waits for a worker to start counts as open: one more than allowed gives 429."""
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet, Settings(max_in_flight=2)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await announce(incarnation="1")
        await is_known(http)
        asked = [tasks.create_task(ask(http.client)) for _ in range(3)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [(await task).status_code for task in done] == [429]
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            assert [(await task).status_code for task in waiting] == [200, 200]


async def test_a_worker_that_is_given_up_ends_the_wait(nats_url: str, fleet: str) -> None:
    """When the supervisor starts the worker no more, the answer is 503 at once, with the last cause."""
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet, Settings(max_wait_s=3600)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await announce()
        await is_known(http)
        waiting = tasks.create_task(ask(http.client))
        await asyncio.wait([waiting], timeout=0.3)
        await announce(state=WorkerState.FAILED, start_left_s=0.0, last_error="no file /data/models/m/config.json")
        status, _, message = error_of(await waiting)

    # The message leaves out the directories of the worker's machine.
    assert (status, "w is not started again: no file config.json" in message) == (503, True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no file /a/b.c/config.json; log: /var/log/w.log", "no file config.json; log: w.log"),
        ("path='/data/m', 'Qwen/Qwen3' is no worker of nats://host:4222/x", "path='m', 'Qwen/Qwen3' is no worker of"),
        ("error:/a/b (/c/d/)", "error:b ()"),
        ("1/2 tokens/s", "1/2 tokens/s"),
    ],
)
def test_messages_have_no_directories(message: str, expected: str) -> None:
    """Absolute paths are reduced to their last component. Other slashes stay."""
    assert without_paths(message).startswith(expected)


async def has_open(http: Http, count: int) -> None:
    """Wait until the service has so many open requests."""

    async def load() -> object:
        return (await http.client.get("/load")).json()["server_load"]

    await until(load, count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{}, {"model": "synthetic"}])
async def test_an_abort_of_all_ends_the_wait_for_a_start(
    nats_url: str, fleet: str, body: dict[str, Any], *, stream: bool
) -> None:
    """Requests that wait for their model's first worker end at once, with the answer of an aborted request."""
    asked: dict[str, Any] = {"n": 2, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet, Settings(max_wait_s=3600)) as http,
        busy_timeout(SOON_S),
        asyncio.TaskGroup() as tasks,
    ):
        await announce()
        await is_known(http)
        bodies = {path: {**GENERATING[path], "model": "synthetic", **asked} for path in GENERATING}
        generate = bodies["/inference/v1/generate"]
        generate["sampling_params"] = {"n": generate.pop("n")}
        waiting = {path: tasks.create_task(http.client.post(path, json=each)) for path, each in bodies.items()}
        await has_open(http, len(waiting))
        aborted = await http.client.post("/abort_requests", json=body)
        answers = {path: await task for path, task in waiting.items()}
        await has_open(http, 0)

    assert (aborted.status_code, aborted.json()["aborted"]) == (200, len(answers)), aborted.text
    for answer in answers.values():
        assert (answer.status_code, answer.headers["X-Request-Id"] in answer.text) == (200, True), answer.text
        if stream:
            *events, done = answer.text.removeprefix("data: ").split("\n\ndata: ")
            assert done.strip() == "[DONE]"
            found = [json.loads(event) for event in events]
            assert (found[-1]["choices"], found[-1]["usage"]["total_tokens"]) == ([], 0)
            choices = [choice for event in found for choice in event["choices"]]
        else:
            choices = answer.json()["choices"]
            assert answer.json()["usage"]["total_tokens"] == 0
        ended = [choice["index"] for choice in choices if choice["finish_reason"] == "abort"]
        assert ended == [0, 1]


async def test_an_abort_by_id_ends_only_that_wait(nats_url: str, fleet: str) -> None:
    """A request that waits for its model's first worker is found by its id. Others go on waiting."""
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await announce(incarnation="1")
        await is_known(http)
        mine, other = [tasks.create_task(ask(http.client, request_id=name)) for name in ("mine", "other")]
        await has_open(http, 2)
        aborted = await http.client.post("/v1/rl/abort", json={"request_ids": ["cmpl-mine"]})
        ended = await mine
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            answer = await other

    assert (aborted.status_code, aborted.json()["aborted"], aborted.json()["not_found"]) == (200, 1, [])
    assert (ended.json()["request_id"], ended.json()["choices"][0]["finish_reason"]) == ("mine", "abort")
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_an_abort_by_id_ends_the_wait_for_a_turn(nats_url: str, fleet: str) -> None:
    """A request that waits behind the requests of others ends at once, and they go on."""
    config = SyntheticConfig(step_s=0.01, max_num_seqs=1)
    endless = {"sampling_params": {"max_tokens": 10_000, "ignore_eos": True}}
    async with (
        http_service(nats_url, fleet, config=config) as http,
        busy_timeout(SOON_S),
        asyncio.TaskGroup() as tasks,
    ):
        others = [tasks.create_task(ask(http.client, **endless)) for _ in range(12)]
        await has_open(http, len(others))
        last = tasks.create_task(ask(http.client, request_id="last", **endless))
        await has_open(http, len(others) + 1)
        aborted = await http.client.post("/v1/rl/abort", json={"request_ids": ["last"]})
        assert (await last).json()["choices"][0]["finish_reason"] == "abort"
        assert not any(task.done() for task in others)
        await http.client.post("/abort_requests", json={})

    assert (aborted.status_code, aborted.json()["aborted"], aborted.json()["not_found"]) == (200, 1, [])


async def test_two_waits_of_a_request_have_one_limit(nats_url: str, fleet: str) -> None:
    """The wait for a start counts in `max_wait_s` of the later wait for a pause: 503 comes before the timeout."""
    settings = Settings(max_wait_s=6.0)
    async with (
        announcing(nats_url, fleet) as announce,
        http_before(nats_url, fleet, settings) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await announce()
        await is_known(http)
        # With a limit for each wait, the timeout would come first.
        waiting = tasks.create_task(ask(http.client, timeout_s=8.5))
        await asyncio.wait([waiting], timeout=4.5)
        for state in (WorkerState.SERVING, WorkerState.PAUSED):
            await announce(state=state, start_left_s=None, free_slots=0, capabilities=capabilities())

            async def state_of() -> object:
                return http.own.fleet.workers[0].state

            await until(state_of, state)
        answer = await waiting

    assert error_of(answer)[:2] == (503, ErrorCode.NO_WORKERS)
