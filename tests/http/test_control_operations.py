"""Asynchronous pauses: any service can report their progress from the recorded state."""

from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.presence import WorkerState
from tests.http.control_support import control_http, in_flight
from tests.http.support import http_before
from tests.support.fleet_states import until_state
from tests.support.hand_control import controlled, silent

Options = dict[str, Any]


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/rl/pause", {"json": {"mode": "wait", "async": True}}),
        ("/pause", {"params": {"mode": "wait"}, "headers": {"Prefer": "wait=10, respond-async"}}),
    ],
    ids=["field", "header"],
)
async def test_an_asynchronous_pause_is_answered_immediately(
    nats_url: str, fleet: str, tmp_path: Path, path: str, options: Options
) -> None:
    """An asynchronous pause gives 202 with an operation that runs until all requests ended, and then has succeeded.

    A service that starts later reports the same.
    """
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        async with in_flight(c.http):
            begun = await c.http.client.post(path, **options)
            location = begun.headers["Location"]
            running = await c.get(location)
        await until_state(c.http.own, lambda state: {worker.state for worker in state.workers} == {WorkerState.PAUSED})
        done = await c.get(location)
        async with http_before(nats_url, fleet) as other:
            told = (await other.client.get(location)).json()
        await c.post("/v1/rl/resume")
        over = await c.get(location)

    assert (begun.status_code, begun.json()["status"]) == (202, "running")
    assert begun.headers["Preference-Applied"] == "respond-async"
    assert location == begun.json()["url"] == f"/v1/rl/operations/{begun.json()['id']}"
    assert (running[0], running[1]["status"], running[1]["inflight_requests"]) == (200, "running", 1)
    assert sorted(line["result"] for line in running[1]["workers"])[-1] == "running"
    assert (done[1]["status"], done[1]["mode"], done[1]["inflight_requests"]) == ("succeeded", "wait", 0)
    assert told == done[1]
    assert (over[1]["status"], {line["result"] for line in over[1]["workers"]}) == ("superseded", {"stale"})


async def test_an_operation_that_takes_too_long_has_failed(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An operation that times out has failed, and its workers stay paused.

    When their requests end, it has succeeded.
    """
    async with control_http(nats_url, fleet, tmp_path) as c:
        async with in_flight(c.http):
            _, begun = await c.post("/v1/rl/pause", {"mode": "wait", "timeout_s": 0.1, "async": True})
            await until_state(c.http.own, lambda state: state.workers[0].state is WorkerState.PAUSED)
            late = await c.get(begun["url"])
        await until_state(c.http.own, lambda state: state.workers[0].in_flight == 0)
        done = await c.get(begun["url"])

    assert (late[1]["status"], late[1]["inflight_requests"]) == ("failed", 1)
    assert late[1]["workers"][0]["result"] == "failed"
    assert done[1]["status"] == "succeeded"


async def test_an_operation_on_named_workers_ignores_other_workers(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An operation on named workers ignores the state of other workers."""
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        _, begun = await c.post("/v1/rl/pause", {"workers": ["w1"], "async": True})
        await until_state(c.http.own, lambda state: WorkerState.PAUSED in {worker.state for worker in state.workers})
        _, told = await c.get(begun["url"])

    assert (told["status"], told["mode"]) == ("succeeded", "keep")
    assert [(line["worker"], line["result"]) for line in told["workers"]] == [("w1", "applied")]


async def test_a_recorded_command_is_answered_without_acks(nats_url: str, fleet: str) -> None:
    """The 202 does not wait for acks, because the desired state is already recorded."""
    async with controlled(nats_url, fleet, "a") as hands, http_before(nats_url, fleet) as http:
        hands["a"].reply = silent
        await hands["a"].announce()
        begun = await http.client.post("/v1/rl/pause", json={"async": True})
        told = (await http.client.get(begun.headers["Location"])).json()

    assert (begun.status_code, told["status"], told["workers"][0]["result"]) == (202, "running", "running")


async def test_an_invalid_operation_gives_the_same_error_as_without_async(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An invalid operation gives the same error as without `async`. Ids that are not of a pause give 404."""
    async with control_http(nats_url, fleet, tmp_path) as c:
        wrong = await c.post("/v1/rl/pause", {"workers": ["w9"], "async": True})
        unknown = await c.get("/v1/rl/operations/nothing")
        _, flushed = await c.post("/v1/rl/flush_cache")
        other = await c.get(f"/v1/rl/operations/{flushed['id']}")

    assert (wrong[0], wrong[1]["error"]["param"]) == (400, "workers")
    assert [status for status, _ in (unknown, other)] == [404, 404]
    assert unknown[1]["error"]["code"] == "unknown_operation"
