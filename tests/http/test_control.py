"""Commands over HTTP: each status occurs in a real fleet, and the response has the result of each worker."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from rollbus import CommandIncomplete, CommandResult
from rollbus.frontend.http import Settings
from rollbus.frontend.http.control.answers import (
    LORA_OF_PRIME,
    RL,
    VLLM,
    ResponseStyle,
    is_done_by_the_living,
    status_of,
)
from rollbus.frontend.http.control.bodies import SendBody, read_query
from rollbus.frontend.http.errors import HttpError
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.presence import WorkerState
from tests.http.support import Control, ControlHttp, Serve, in_flight, together
from tests.support.fleet import all_serve, until_state, until_worker
from tests.support.hand_control import controlled, silent

COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("pause", {}),
    ("resume", {}),
    ("drain", {"workers": ["w0"]}),
    ("flush_cache", {}),
    ("update_weights", {"path": "/x", "version": 3}),
    ("load_lora_adapter", {"name": "a", "path": "/x"}),
    ("unload_lora_adapter", {"name": "a"}),
]
LEDGER = {"command", "id", "complete", "epochs", "seconds", "workers", "not_found"}


def results(ledger: dict[str, Any]) -> dict[str, str]:
    """Return the result of each worker."""
    return {line["worker"]: line["result"] for line in ledger["workers"]}


async def test_all_workers_apply_each_command(control: Control) -> None:
    """Each command gives 200 and a ledger with a line per worker, and the fleet reaches the requested state."""
    async with control(2) as c:
        bodies: dict[str, Any] = {
            "pause": {"mode": "abort", "clear_cache": True, "timeout_s": 20},
            "flush_cache": {"preempt": True},
            "update_weights": {"path": str(c.root / "two"), "version": 7, "model": "synthetic"},
            "load_lora_adapter": {"name": "math", "path": str(c.root / "adapter"), "version": 4},
            "drain": {"workers": ["w0", "w1"]},
            "resume": {"workers": ["w0", "w1"]},
        }
        answers = {name: await c.post(f"/v1/rl/{name}", body) for name, body in bodies.items()}
        state = await until_state(
            c.http.rb, lambda state: all_serve(state) and all(worker.loras for worker in state.workers)
        )
        unloaded = await c.post("/v1/rl/unload_lora_adapter", {"name": "math"})
        after = await until_state(c.http.rb, lambda state: not any(worker.loras for worker in state.workers))

    for status, ledger in (*answers.values(), unloaded):
        assert (status, ledger["complete"], results(ledger)) == (200, True, {"w0": "applied", "w1": "applied"})
        assert ledger.keys() >= LEDGER
        assert "error" not in ledger
    assert answers["pause"][1]["epochs"] == {"synthetic": 1}
    assert answers["update_weights"][1]["workers"][0]["canary"]["token_ids"]
    assert answers["update_weights"][1]["weight_version"] == 7
    assert [(worker.state, worker.weight_version) for worker in state.workers] == [(WorkerState.SERVING, 7)] * 2
    assert [[(it.name, it.version) for it in worker.loras] for worker in state.workers] == [[("math", 4)]] * 2
    assert [worker.loras for worker in after.workers] == [(), ()]


async def test_an_empty_fleet_is_503(serve_fleet: Serve) -> None:
    """Without workers, each command and each read gives 503 under all names, and the desired state records nothing."""
    weights = {"weight_dir": "/x"}
    commands = [*COMMANDS, ("pause", {"async": True}), ("update_weights", {"path": "/x"}), ("update_weights", weights)]
    posts = [(f"/v1/rl/{name}", body) for name, body in commands]
    posts += [("/update_weights", weights), ("/pause", {}), ("/resume", {}), ("/reset_prefix_cache", {})]
    reads = ("/is_paused", "/liveness", "/v1/rl/health", "/v1/rl/weight_version", "/weight_info")
    async with serve_fleet() as http:
        calls = [http.client.post(path, json=body) for path, body in posts]
        answers = await together(*calls, *map(http.client.get, reads))
        for answer in answers:
            assert answer.status_code == 503, answer.url
            if answer.request.method == "POST":
                assert (answer.json()["error"]["code"], "Retry-After" in answer.headers) == ("no_workers", True)
        assert not (await http.rb.fleet.state()).desired


async def test_a_command_is_207_if_a_worker_applies_and_502_if_all_fail(control: Control) -> None:
    """If one of two engines fails, the status is 207 and the ledger has the reason. If both fail, it is 502."""
    async with control(2) as c:
        c.engines[0].faults = replace(c.engines[0].faults, reset_cache=True)
        some = await c.post("/v1/rl/flush_cache")
        c.engines[1].faults = replace(c.engines[1].faults, reset_cache=True)
        none = await c.post("/v1/rl/flush_cache")

    assert (some[0], results(some[1])) == (207, {"w0": "failed", "w1": "applied"})
    assert (some[1]["complete"], some[1]["error"]["code"]) == (False, "partial")
    assert "w0" in some[1]["error"]["message"]
    assert (none[0], results(none[1])) == (502, {"w0": "failed", "w1": "failed"})
    assert none[1]["error"] == {**none[1]["error"], "type": "server_error", "param": None, "code": "cache_in_use"}


async def test_an_update_that_an_engine_fails_is_207(control: Control) -> None:
    """If an engine fails an update, only the other worker has the new weights.

    The failed one serves nothing until an update works.
    """
    async with control(2) as c:
        body = {"path": str(c.root / "two"), "version": 2}
        c.engines[0].faults = replace(c.engines[0].faults, load="half_written")
        some = await c.post("/v1/rl/update_weights", body)
        await until_worker(c.http.own, "w0", WorkerState.POISONED)
        await until_worker(c.http.own, "w1", WorkerState.SERVING)
        health, versions = await together(c.get("/v1/rl/health"), c.get("/v1/rl/weight_version"))
        c.engines[0].faults = replace(c.engines[0].faults, load=None)
        again = await c.post("/v1/rl/update_weights", {**body, "version": 3})

    assert (some[0], results(some[1])) == (207, {"w0": "failed", "w1": "applied"})
    assert (health[0], health[1]["workers"]) == (200, {"poisoned": 1, "serving": 1})
    assert "w0" in health[1]["errors"]
    assert health[1]["unpinned"] == []
    assert (versions[1]["weight_version"], versions[1]["is_uniform"]) == (2, True)
    assert versions[1]["desired"] == {"w0": 2, "w1": 2}
    assert (again[0], again[1]["weight_version"]) == (200, 3)


def acks(*codes: ControlCode, status: AckStatus = AckStatus.FAILED) -> dict[str, Ack]:
    """Return an ack with each of these codes."""
    return {
        f"w{at}": Ack(
            id="c",
            command="pause",
            worker=f"w{at}",
            incarnation="i",
            model="m",
            status=status,
            error=AckError(code=code, message="no"),
        )
        for at, code in enumerate(codes)
    }


APPLIED = {"a": replace(acks(ControlCode.UNKNOWN)["w0"], status=AckStatus.APPLIED, error=None)}
IN_USE, STALE = acks(ControlCode.CACHE_IN_USE), acks(ControlCode.STALE, status=AckStatus.STALE)
STATUSES: list[tuple[ResponseStyle, dict[str, Any], tuple[int, str]]] = [
    (RL, {"applied": APPLIED, "failed": IN_USE}, (207, "partial")),
    (VLLM, {"applied": APPLIED, "missing": {"b": "lost"}}, (502, "partial")),
    (RL, {"failed": acks(ControlCode.CACHE_IN_USE, ControlCode.CACHE_IN_USE)}, (502, "cache_in_use")),
    (RL, {"failed": acks(ControlCode.CACHE_IN_USE, ControlCode.UNKNOWN)}, (502, "not_applied")),
    # The workers that accept the path have only checked it.
    (RL, {"command": "check", "applied": APPLIED, "failed": acks(ControlCode.PATH_REFUSED)}, (403, "path_refused")),
    (RL, {"stale": STALE}, (409, "stale")),
    (RL, {"failed": acks(ControlCode.TRANSFER_HELD)}, (409, "transfer_held")),
    (RL, {"failed": acks(ControlCode.TIMEOUT)}, (504, "timeout")),
    (RL, {"missing": {"a": "no ack", "b": "it has stopped"}}, (504, "timeout")),
    (RL, {"unsupported": acks(ControlCode.UNSUPPORTED, status=AckStatus.UNSUPPORTED)}, (400, "unsupported")),
    (VLLM, {"failed": acks(ControlCode.BAD_SOURCE)}, (400, "bad_source")),
    (LORA_OF_PRIME, {"failed": acks(ControlCode.BAD_SOURCE)}, (404, "bad_source")),
    (RL, {"applied": APPLIED, "not_found": ("r",)}, (404, "not_found")),
    (RL, {"failed": IN_USE, "not_found": ("r",)}, (502, "cache_in_use")),
]


@pytest.mark.parametrize(("style", "results", "expected"), STATUSES)
def test_the_status_says_which_workers_failed_and_why(
    style: ResponseStyle, results: dict[str, Any], expected: tuple[int, str]
) -> None:
    """The status and code of a command that not all workers applied follow from their results."""
    ledger = CommandResult(**{"command": "pause", "id": "c", **results})
    assert status_of(ledger, "pause", style) == expected


@pytest.mark.parametrize(
    ("results", "check_of", "expected"),
    [
        ({"applied": APPLIED, "missing": {"b": "its lease expired"}}, None, True),
        ({"applied": APPLIED, "missing": {"b": "its lease expired"}, "epochs": {}}, None, False),
        ({"applied": APPLIED, "missing": {"b": "its lease expired", "c": "it did not answer"}}, None, False),
        ({"applied": APPLIED, "missing": {"b": "its lease expired"}}, "update_weights", False),
        ({"applied": APPLIED, "missing": {"b": "its lease expired"}, "failed": IN_USE}, None, False),
        ({"missing": {"b": "its lease expired"}}, None, False),
    ],
)
def test_only_workers_that_died_may_be_left_out(results: dict[str, Any], check_of: str | None, expected: bool) -> None:
    """A recorded command is done without a worker that died, but not if a live one did not apply it.

    Neither is one that was only checked, or that is not recorded.
    """
    ledger = CommandResult(**{"command": "pause", "id": "c", "epochs": {"m": 1}, **results})
    error = CommandIncomplete(ledger, check_of=check_of)
    assert is_done_by_the_living(error, {"a", "c"}) is expected


async def test_paths_outside_the_roots_are_403(control: Control, tmp_path: Path) -> None:
    """Each worker refuses a path outside its roots, by `..`, by a link or relative, and nothing changes."""
    async with control(2) as c:
        (c.root / "link").symlink_to(tmp_path)
        paths = ["/etc", str(c.root / ".." / "root2"), str(c.root / "link"), "one"]
        calls = []
        for i, path in enumerate(paths):
            calls.append(c.post("/v1/rl/update_weights", {"path": path, "version": 9}))
            calls.append(c.post("/v1/rl/update_weights", {"weight_dir": path}))
            calls.append(c.post("/v1/rl/load_lora_adapter", {"lora_name": f"a{i}", "lora_path": path}))
        for status, ledger in await together(*calls):
            assert (status, ledger["error"]["code"]) == (403, "path_refused"), ledger
            assert results(ledger) == {"w0": "failed", "w1": "failed"}
        state = await c.http.rb.fleet.state()

    assert [(worker.state, worker.weight_version) for worker in state.workers] == [(WorkerState.SERVING, 1)] * 2
    assert not any(desired.registers for desired in state.desired.values())


async def test_an_older_version_is_409(control: Control) -> None:
    """An older version gives 409, and so does the same version with other weights. `allow_rollback` permits both."""
    async with control() as c:
        one, two = str(c.root / "one"), str(c.root / "two")
        good = await c.post("/v1/rl/update_weights", {"path": two, "version": 5})
        older = await c.post("/v1/rl/update_weights", {"path": one, "version": 4})
        same = await c.post("/v1/rl/update_weights", {"path": one, "version": 5})
        back = await c.post("/v1/rl/update_weights", {"path": one, "version": 4, "allow_rollback": True})

    assert [good[0], older[0], same[0], back[0]] == [200, 409, 409, 200]
    assert older[1]["error"]["code"] == same[1]["error"]["code"] == "old_version"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("pause", {"workers": ["w0", "w9"]}, "workers"),
    ("pause", {"workers": ["a.b"]}, "workers"),
    ("pause", {"model": "other"}, "model"),
    ("pause", {"mode": "keep", "wait_for_inflight_requests": True}, "wait_for_inflight_requests"),
    ("resume", {"mode": "keep"}, "mode"),
    ("drain", {}, "workers"),
    ("drain", {"workers": ["w9"]}, "workers"),
    ("flush_cache", {"preempt": True, "reset_running_requests": True}, "reset_running_requests"),
    ("flush_cache", {"reset_external": True}, "reset_external"),
    ("update_weights", {}, "path"),
    ("update_weights", {"path": "/x", "objects": "a/b"}, "objects"),
    ("update_weights", {"objects": "../x"}, "objects"),
    ("update_weights", {"path": "/x", "weight_dir": "/x"}, "weight_dir"),
    ("update_weights", {"path": "/x", "upload": True}, "upload"),
    ("update_weights", {"path": "/x", "expected_canary": {"token_ids": []}}, "expected_canary.logprobs"),
    ("update_weights", {"update_info": {}, "version": 2}, "version"),
    ("load_lora_adapter", {"path": "/x"}, "name"),
    ("load_lora_adapter", {"name": "a"}, "path"),
    ("load_lora_adapter", {"lora_name": "a"}, "lora_path"),
    ("load_lora_adapter", {"lora_name": "a\n", "lora_path": "/x"}, "lora_name"),
    ("load_lora_adapter", {"name": "a", "path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ("unload_lora_adapter", {}, "name"),
]


async def test_wrong_fields_are_named(control: Control) -> None:
    """A wrong field gives 400 with its name and the allowed values, and nothing is recorded."""
    async with control() as c:
        answers = await together(*(c.post(f"/v1/rl/{name}", body) for name, body, _ in WRONG))
        for (name, body, field), (status, answer) in zip(WRONG, answers, strict=True):
            assert (status, answer["error"]["param"]) == (400, field), (name, body, answer)
            assert answer["error"]["type"] == "invalid_request_error"
        for query in ("mode=stop", "modus=keep", "mode=keep&mode=wait", "timeout_s=nan"):
            status, answer = await c.post(f"/v1/rl/pause?{query}")
            assert (status, answer["error"]["param"]) == (400, query.partition("=")[0]), (query, answer)
        both = await c.post("/v1/rl/pause?mode=keep", {"clear_cache": True})
        other_json = [await c.http.client.post("/v1/rl/pause", content=body) for body in (b"[1]", b"{", b"\xff")]
        assert not (await c.http.rb.fleet.state()).desired

    assert (both[0], both[1]["error"]["param"]) == (400, "mode")
    assert [answer.status_code for answer in other_json] == [400] * 3


def test_the_time_for_a_query_grows_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter makes the service look at all others: a head has room for thousands."""
    looks, real = Mock(), QueryParams.getlist
    monkeypatch.setattr(QueryParams, "getlist", lambda self, key: (looks(), real(self, key))[1])
    with pytest.raises(HttpError, match="n0 is unknown"):
        read_query(Mock(query_params=QueryParams([(f"n{number}", "") for number in range(99)])), SendBody)
    assert looks.call_count < 10


async def test_an_update_of_weights_must_name_its_model(control: Control) -> None:
    """With two models, a pause applies to both. An update of weights must name its model, with or without a version."""
    async with control(models=("a", "b")) as c:
        body = {"path": str(c.root / "two")}
        bodies: list[dict[str, Any]] = [body, {**body, "version": 2}]
        wrong = await together(*(c.post("/v1/rl/update_weights", each) for each in bodies))
        named = await c.post("/v1/rl/update_weights", {**body, "model": "b"})
        paused = await c.post("/v1/rl/pause")
        await until_worker(c.http.own, "w1", lambda worker: worker.weight_version == 2)
        version, mixed, unknown = await together(
            *(c.get(f"/v1/rl/weight_version{query}") for query in ("?model=b", "", "?model=c"))
        )

    assert [(status, answer["error"]["param"]) for status, answer in wrong] == [(400, "model")] * 2
    assert (named[0], results(named[1])) == (200, {"w1": "applied"})
    assert (paused[0], paused[1]["epochs"]) == (200, {"a": 1, "b": 2})
    assert version[1]["workers"] == {"w1": 2}
    assert (mixed[1]["weight_version"], mixed[1]["newest_weight_version"], mixed[1]["is_uniform"]) == (1, 2, False)
    assert (unknown[0], unknown[1]["error"]["param"]) == (400, "model")


async def test_each_update_without_a_version_gets_its_own_version(control: Control, serve_fleet: Serve) -> None:
    """If two controllers load weights without a version at the same time, each update gets its own version."""
    async with control() as c, serve_fleet() as other:
        async with asyncio.TaskGroup() as tasks:
            posting = [
                tasks.create_task(http.client.post("/v1/rl/update_weights", json={"path": str(c.root / name)}))
                for http, name in ((c.http, "one"), (other, "two"))
            ]
        answers = [task.result() for task in posting]
        state = await until_state(c.http.rb, all_serve)

    # One update may be replaced before it is applied. No version is used for two updates.
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert 200 in {answer.status_code for answer in answers}
    versions = [answer.json()["weight_version"] for answer in answers if answer.status_code == 200]
    assert len(set(versions)) == len(versions)
    assert (state.workers[0].weight_version, state.workers[0].state) == (3, WorkerState.SERVING)


async def test_a_command_continues_after_its_client_disconnects(control: Control) -> None:
    """If a client disconnects, its pause is still carried out, and the service answers other clients meanwhile."""
    async with control() as c:
        async with in_flight(c.http) as chunks:
            with pytest.raises(httpx.ReadTimeout):
                await c.http.client.post("/v1/rl/pause", json={"mode": "wait"}, timeout=0.5)
            await until_state(c.http.rb, lambda state: bool(state.desired))
            assert (await c.http.client.get("/health")).status_code == 200
            assert chunks[-1].end is None
        state = await until_state(c.http.rb, lambda state: state.workers[0].state is WorkerState.PAUSED)

    assert state.workers[0].pause_mode == "wait"


async def test_commands_require_the_admin_token(control: Control) -> None:
    """The data token opens the routes that only read. Each route that changes something requires the admin token."""
    settings = Settings(token="data", admin_token="admin")
    async with control(settings=settings) as c:
        await _check_access(c)
        assert not (await c.http.rb.fleet.state()).desired


async def _check_access(c: ControlHttp) -> None:
    from rollbus.frontend.http.control import ADMIN_ROUTES, DATA_ROUTES, ROUTES

    data, admin = ({"Authorization": f"Bearer {token}"} for token in ("data", "admin"))
    shut = [(route, headers, 401) for route in ADMIN_ROUTES for headers in ({}, data)]
    statuses = {route: 501 if route in DATA_ROUTES else 404 if "{id}" in route[1] else 200 for route in ROUTES}
    open_ = [(route, headers, status) for route, status in statuses.items() for headers in (data, admin)]
    calls = [*shut, *open_, *((route, {}, 401) for route in ROUTES)]
    answers = await together(*(c.http.client.request(*route, headers=headers) for route, headers, _ in calls))
    for (route, headers, status), answer in zip(calls, answers, strict=True):
        assert answer.status_code == status, (route, headers)


# Asynchronous pauses: any service can report their progress from the recorded state.


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
    control: Control, serve_fleet: Serve, path: str, options: Options
) -> None:
    """An asynchronous pause gives 202 with an operation that runs until all requests ended, and then has succeeded.

    A service that starts later reports the same.
    """
    async with control(2) as c:
        async with in_flight(c.http):
            begun = await c.http.client.post(path, **options)
            location = begun.headers["Location"]
            running = await c.get(location)
        await until_state(c.http.own, lambda state: {worker.state for worker in state.workers} == {WorkerState.PAUSED})
        done = await c.get(location)
        async with serve_fleet() as other:
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


async def test_an_operation_that_takes_too_long_has_failed(control: Control) -> None:
    """An operation that times out has failed, and its workers stay paused.

    When their requests end, it has succeeded.
    """
    async with control() as c:
        async with in_flight(c.http):
            _, begun = await c.post("/v1/rl/pause", {"mode": "wait", "timeout_s": 0.1, "async": True})
            await until_state(c.http.own, lambda state: state.workers[0].state is WorkerState.PAUSED)
            late = await c.get(begun["url"])
        await until_state(c.http.own, lambda state: state.workers[0].in_flight == 0)
        done = await c.get(begun["url"])

    assert (late[1]["status"], late[1]["inflight_requests"]) == ("failed", 1)
    assert late[1]["workers"][0]["result"] == "failed"
    assert done[1]["status"] == "succeeded"


async def test_an_operation_on_named_workers_ignores_other_workers(control: Control) -> None:
    """An operation on named workers ignores the state of other workers."""
    async with control(2) as c:
        _, begun = await c.post("/v1/rl/pause", {"workers": ["w1"], "async": True})
        await until_state(c.http.own, lambda state: WorkerState.PAUSED in {worker.state for worker in state.workers})
        _, told = await c.get(begun["url"])

    assert (told["status"], told["mode"]) == ("succeeded", "keep")
    assert [(line["worker"], line["result"]) for line in told["workers"]] == [("w1", "applied")]


async def test_a_recorded_command_is_answered_without_acks(serve_fleet: Serve, nats_url: str, fleet: str) -> None:
    """The 202 does not wait for acks, because the desired state is already recorded."""
    async with controlled(nats_url, fleet, "a") as hands, serve_fleet() as http:
        hands["a"].reply = silent
        await hands["a"].announce()
        begun = await http.client.post("/v1/rl/pause", json={"async": True})
        told = (await http.client.get(begun.headers["Location"])).json()

    assert (begun.status_code, told["status"], told["workers"][0]["result"]) == (202, "running", "running")


async def test_an_invalid_operation_gives_the_same_error_as_without_async(control: Control) -> None:
    """An invalid operation gives the same error as without `async`. An unknown id gives 404, each recorded one 200."""
    async with control() as c:
        wrong = await c.post("/v1/rl/pause", {"workers": ["w9"], "async": True})
        unknown = await c.get("/v1/rl/operations/nothing")
        _, flushed = await c.post("/v1/rl/flush_cache")
        other = await c.get(f"/v1/rl/operations/{flushed['id']}")

    assert (wrong[0], wrong[1]["error"]["param"]) == (400, "workers")
    assert unknown[0] == 404
    assert (other[0], other[1]["operation"], other[1]["status"]) == (200, "flush_cache", "succeeded")
    assert unknown[1]["error"]["code"] == "unknown_operation"
