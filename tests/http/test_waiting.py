"""HTTP requests wait a limited time for a worker that comes."""

import asyncio
from typing import Any

import httpx
import pytest

from rollbus.frontend.http.settings import Settings
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import WorkerState
from tests.bus.test_waiting import announcing
from tests.http.support import Http, http_before, http_service
from tests.http.test_models import BODY, error_of
from tests.support.fleet import synthetic_worker
from tests.support.patience import busy_timeout, patient
from tests.support.presences import capabilities
from tests.support.waits import until_true

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
        await announce(state=WorkerState.FAILED, start_left_s=0.0, last_error="ended with exit code 1")
        status, _, message = error_of(await waiting)

    assert (status, "w is not started again: ended with exit code 1" in message) == (503, True)
