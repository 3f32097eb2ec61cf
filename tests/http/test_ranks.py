"""Ranks for a weight transfer: the number of ranks in a fleet, and the rank offset of each worker."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

import rollbus
from rollbus.bus.client.client import runtime_of
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.fleet.presence import LostWorker, Survivor
from rollbus.bus.subjects import Subjects
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.requests import named_errors
from rollbus.schemas.control import DesiredState, LoadLora
from rollbus.schemas.errors import ErrorCode, RequestError
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.schemas.weights import WeightSource
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.http.support import Control, ControlHttp, Serve, control_http, http_before
from tests.support.fleet import synthetic_worker
from tests.support.nats_server import opened
from tests.support.requests import greedy
from tests.support.waits import until_true


async def test_ranks_are_counted_in_the_order_of_ids(serve_fleet: Serve, nats_url: str, fleet: str) -> None:
    """Each worker has its number of ranks and an offset after those of the workers with smaller ids."""
    async with (
        synthetic_worker(nats_url, fleet, config=SyntheticConfig(world_size=3), worker_id="w1"),
        synthetic_worker(nats_url, fleet, config=SyntheticConfig(world_size=2), worker_id="w0"),
        serve_fleet() as http,
    ):
        await http.own.fleet.wait_for_workers(2)
        answer = (await http.client.get("/get_world_size")).json()
        without = (await http.client.get("/get_world_size", params={"include_dp": "false"})).json()
        unknown = await http.client.get("/get_world_size", params={"model": "other"})
    assert answer == {
        "world_size": 5,
        "engines": 2,
        "workers": [
            {"worker": "w0", "world_size": 2, "rank_offset": 0},
            {"worker": "w1", "world_size": 3, "rank_offset": 2},
        ],
    }
    assert without["world_size"] == 5
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "model")


async def test_missing_ranks_are_an_error(serve: Serve, nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A worker of an earlier release gives 501, several models without a choice give 400, and no workers give 503."""
    async with serve(config=SyntheticConfig(world_size=None)) as http:
        silent = await http.client.get("/get_world_size")
        info = {"init_info": {"rank_offset": 1}}
        begun = await http.client.post("/init_weight_transfer_engine", json=info)
    async with control_http(nats_url, f"{fleet}-two", tmp_path, models=("a", "b")) as c:
        several = await c.http.client.get("/get_world_size")
        one = await c.http.client.get("/get_world_size", params={"model": "b"})
    async with http_before(nats_url, f"{fleet}-empty") as http:
        empty = await http.client.get("/get_world_size")
    assert [answer.status_code for answer in (silent, begun, several, one, empty)] == [501, 501, 400, 200, 503]
    assert one.json()["workers"] == [{"worker": "w1", "world_size": 1, "rank_offset": 0}]


async def test_each_worker_gets_its_own_offset(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request gives each worker its own rank offset.

    A command to named workers, or without ranks, stays unchanged.
    """
    given: dict[int, list[Mapping[str, Any]]] = {}

    async def note(engine: SyntheticEngine, info: Mapping[str, Any]) -> None:
        given.setdefault(id(engine), []).append(info)

    monkeypatch.setattr(SyntheticEngine, "init_weight_transfer", note)
    url = "/init_weight_transfer_engine"
    async with control(2) as c:
        info = {"master_address": "h", "rank_offset": 1, "world_size": 3}
        status, answer = await c.post(url, {"init_info": info})
        named = await c.post(url, {"init_info": info, "workers": ["w1"]})
        plain = await c.post(url, {"init_info": {"a": 1}})
        told = [given[id(engine)] for engine in c.engines]
    assert (status, answer["message"], answer["complete"]) == (200, "Weight transfer initialized", True)
    assert [line["worker"] for line in answer["workers"]] == ["w0", "w1"]
    assert told == [[info, {"a": 1}], [{**info, "rank_offset": 2}, info, {"a": 1}]]
    assert (named[0], plain[0]) == (200, 200)


async def test_a_rank_offset_that_any_worker_refuses_is_502(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one worker refuses its offset, the status is 502 and the ledger has the workers of both commands."""

    async def refuse(_engine: SyntheticEngine, info: Mapping[str, Any]) -> None:
        if info["rank_offset"] == 1:
            raise RuntimeError("rank 1 is taken")

    monkeypatch.setattr(SyntheticEngine, "init_weight_transfer", refuse)
    async with control(2) as c:
        status, answer = await c.post("/init_weight_transfer_engine", {"init_info": {"rank_offset": 0}})
    assert (status, answer["error"]["code"]) == (502, "partial")
    assert {line["worker"]: line["result"] for line in answer["workers"]} == {"w0": "applied", "w1": "failed"}


async def test_each_service_returns_a_text_version_unchanged(control: Control, serve_fleet: Serve) -> None:
    """Each service returns a text version beside the numeric version. A numeric text is the version itself."""
    async with control() as c:

        async def updated(**fields: object) -> tuple[int, str, int]:
            folder = "two" if fields.pop("two", False) else "one"
            status, answer = await c.post("/update_weights", {"weight_dir": str(c.root / folder), **fields})
            assert status == 200, answer
            info = (await c.get("/v1/rl/weight_info"))[1]
            return answer["weight_version"], info["weight_version"], info["version"]

        assert await updated(two=True, weight_version="step-42") == (2, "step-42", 2)
        async with serve_fleet() as other:
            await other.own.fleet.wait_for_workers()
            assert (await other.client.get("/weight_info")).json()["weight_version"] == "step-42"
        assert await updated(weight_version="7") == (7, "7", 7)
        assert await updated(two=True, weight_version="008") == (8, "008", 8)
        assert await updated(version=12, weight_version="checkpoint/final") == (12, "checkpoint/final", 12)
        assert await updated(two=True) == (13, "13", 13)
        await c.post("/start_weight_update", {"is_checkpoint_format": True})
        await c.post("/update_weights", {"update_info": {"seed": 4, "is_checkpoint_format": True}})
        finished = await c.post("/finish_weight_update", {"weight_version": "step-50"})
        info = (await c.get("/weight_info"))[1]
        both = await c.post("/finish_weight_update", {"weight_version": "5", "version": 5})
        wrong = [
            await c.post("/start_weight_update", {"is_checkpoint_format": False}),
            await c.post("/update_weights", {"update_info": {"is_checkpoint_format": False}}),
        ]
    assert (finished[0], info) == (200, {"weight_version": "step-50", "version": 14})
    assert (both[0], both[1]["error"]["param"]) == (400, "weight_version")
    assert [(status, answer["error"]["param"]) for status, answer in wrong] == [
        (400, "is_checkpoint_format"),
        (400, "update_info.is_checkpoint_format"),
    ]


async def test_a_text_version_is_refused_if_a_worker_of_an_earlier_release_runs(serve: Serve) -> None:
    """If a worker of an earlier release cannot decode a text version, the status is 400 with field and workers.

    The desired state records nothing.
    """
    async with serve(config=SyntheticConfig(version_labels=False)) as http:
        answers = [
            await http.client.post(path, json={"weight_version": "step-42", **more})
            for path, more in (("/update_weights", {"weight_dir": "/two"}), ("/finish_weight_update", {}))
        ]
        state = await http.rb.fleet.state()
    assert [answer.status_code for answer in answers] == [400, 400]
    for answer in answers:
        error = answer.json()["error"]
        assert error["param"] == "weight_version"
        assert error["message"].startswith("weight_version is 'step-42', ")
        assert f"until {state.workers[0].worker} are upgraded" in error["message"]
    assert not state.desired


async def test_the_routes_of_dynamo_list_load_replace_and_unload_adapters(control: Control) -> None:
    """Dynamo's routes list, load, replace and unload adapters, also with slashes in the name."""
    async with control(2) as c:
        client = c.http.client
        adapter = {"lora_name": "team/a", "source": {"uri": (c.root / "adapter").as_uri()}}
        loaded = [await c.post("/v1/loras", {**adapter, **more}) for more in ({}, {"load_inplace": True})]
        refused = await c.post("/v1/loras", {**adapter, "load_inplace": False})
        elsewhere = await c.post("/v1/loras", {**adapter, "source": {"uri": "s3://bucket/a"}})
        absent = await c.post("/v1/loras", {"lora_name": "b", "source": {"uri": str(c.root / "absent")}})
        listed = (await client.get("/v1/loras")).json()
        gone = await client.delete("/v1/loras/team/a")
        again = await client.delete("/v1/loras/team/a")
        left = (await client.get("/v1/loras")).json()
    assert [(status, answer["status"], answer["lora_name"]) for status, answer in loaded] == [
        (200, "success", "team/a")
    ] * 2
    assert (listed["status"], listed["loras"], listed["count"]) == ("success", {"team/a": 2}, 1)
    assert listed["adapters"] == [{"name": "team/a", "model": "synthetic", "workers": {"w0": 2, "w1": 2}}]
    assert (refused[0], refused[1]["error"]["param"]) == (400, "lora_name")
    assert (elsewhere[0], elsewhere[1]["error"]["param"]) == (400, "source.uri")
    assert (absent[0], absent[1]["error"]["code"]) == (404, "bad_source")
    assert (gone.status_code, gone.json()["status"]) == (200, "success")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")
    assert (left["loras"], left["count"]) == ({}, 0)


# After an ack, the next request sees what the ack says, also if presence arrives late or at another service.


LATE_S = 0.4
"""Seconds by which presence is late: more than a ping waits, and less than an answer does."""
NEVER_S = 3600.0


@contextlib.contextmanager
def late_presence(client: rollbus.Client, late_s: float = LATE_S) -> Iterator[None]:
    """Deliver all presence to this client late, in order."""
    watcher = runtime_of(client).watcher
    update = watcher.table.update

    def deliver(presence: WorkerPresence) -> None:
        update(presence, time.monotonic())
        watcher.expire()

    def update_later(presence: WorkerPresence, _now: float) -> LostWorker | Survivor | None:
        asyncio.get_running_loop().call_later(late_s, deliver, presence)
        return None

    with mock.patch.object(watcher.table, "update", update_later):
        yield


async def ask(client: httpx.AsyncClient, model: str) -> tuple[int, str | None]:
    """Request a token. Return the status and the error code."""
    answer = await client.post(
        "/inference/v1/generate", json={"model": model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    )
    return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]


async def load(c: ControlHttp, name: str = "math") -> None:
    """Load the adapter through the first service."""
    status, ledger = await c.post("/v1/rl/load_lora_adapter", {"name": name, "path": str(c.root / "adapter")})
    assert status == 200, ledger


async def test_a_request_after_an_acked_load_has_its_adapter(control: Control) -> None:
    """A request after the ack of a load is served by the adapter, and after the ack of an unload it is 404."""
    async with control(2) as c:
        with late_presence(c.http.own):
            await load(c)
            found = await ask(c.http.client, "math")
            listed = await c.http.client.get("/v1/models/math")
            unloaded, _ = await c.post("/v1/rl/unload_lora_adapter", {"name": "math"})
            gone = await ask(c.http.client, "math")
            again, _ = await c.post("/v1/rl/unload_lora_adapter", {"name": "math"})

    assert (found, listed.status_code) == ((200, None), 200)
    assert (unloaded, gone, again) == (200, (404, ErrorCode.UNKNOWN_MODEL), 404)


async def test_another_service_reads_the_record_before_it_refuses(control: Control, serve_fleet: Serve) -> None:
    """A service whose presence is older than another service's ack serves the new adapter, in all routes.

    An adapter that is recorded and not loaded yet is 503, and a name that nobody recorded is 404.
    """
    async with control() as c, serve_fleet() as other:
        await other.own.fleet.wait_for_workers()
        with late_presence(other.own):
            await load(c)
            assert await ask(other.client, "math") == (200, None)
            await load(c, "chess")
            assert (await other.client.get("/v1/models/chess")).status_code == 200
        await until_true(lambda: len(other.own.fleet.workers[0].loras) == 2)
        with late_presence(other.own, NEVER_S):
            await load(c, "poetry")
            assert await ask(other.client, "poetry") == (503, ErrorCode.NO_WORKERS)
            assert await ask(other.client, "nobody") == (404, ErrorCode.UNKNOWN_MODEL)


async def test_an_adapter_of_a_base_without_workers_has_no_workers(
    serve_fleet: Serve, nats_url: str, fleet: str
) -> None:
    """An adapter that is recorded for a base without workers is 503, because its workers may come."""
    async with opened(nats_url) as nats, serve_fleet() as http:
        command = LoadLora(name="math", source=WeightSource(path="/x"), version=1)
        await DesiredStore(nats, Subjects(fleet)).record("base", command)
        assert await ask(http.client, "math") == (503, ErrorCode.NO_WORKERS)
        assert await ask(http.client, "base") == (503, ErrorCode.NO_WORKERS)
        assert await ask(http.client, "nobody") == (404, ErrorCode.UNKNOWN_MODEL)


async def test_unknown_names_share_reads_of_the_states(serve_fleet: Serve) -> None:
    """Requests with unknown names that arrive together share reads, and the next read waits for its time."""
    reads: list[str] = []
    read_all = DesiredStore.read_all

    async def noted(store: DesiredStore) -> dict[str, DesiredState]:
        reads.append("read")
        return await read_all(store)

    async with serve_fleet() as http:
        ask_for = http.own.fleet.models_with_adapter
        with (
            mock.patch.object(DesiredStore, "read_all", noted),
            mock.patch("rollbus.bus.client.presence.READ_S", NEVER_S),
        ):
            await ask_for("first")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATE_S), asyncio.TaskGroup() as tasks:
                    for number in range(40):
                        tasks.create_task(ask_for(f"nobody-{number}"))

    assert reads == ["read"]


async def test_reads_of_the_applied_state_show_what_was_acked(control: Control, serve_fleet: Serve) -> None:
    """After an ack, each service answers with the new state. If presence does not arrive, the answer says `stale`."""
    async with control(2) as c, serve_fleet() as other:
        await other.own.fleet.wait_for_workers(2)
        with late_presence(other.own):
            assert (await c.post("/pause"))[0] == 200
            paused = (await other.client.get("/is_paused")).json()
            assert (await c.post("/resume"))[0] == 200
            resumed = (await other.client.get("/is_paused")).json()
            body = {"path": str(c.root / "two"), "version": 7}
            assert (await c.post("/v1/rl/update_weights", body))[0] == 200
            versions = (await other.client.get("/v1/rl/weight_version")).json()
            await load(c)
            loras = (await other.client.get("/v1/loras")).json()
        with late_presence(other.own, NEVER_S):
            assert (await c.post("/pause"))[0] == 200
            paths = (
                "/is_paused",
                "/is_sleeping",
                "/v1/rl/weight_version",
                "/weight_info",
                "/v1/loras",
                "/v1/rl/health",
            )
            async with asyncio.TaskGroup() as tasks:
                reads = [tasks.create_task(other.client.get(path)) for path in paths]
            stale = [read.result().json() for read in reads]

    assert (paused, resumed) == ({"is_paused": True}, {"is_paused": False})
    assert (versions["workers"], versions["is_uniform"]) == ({"w0": 7, "w1": 7}, True)
    assert loras["adapters"][0]["workers"] == {"w0": 1, "w1": 1}
    assert not {"stale"} & (versions.keys() | loras.keys())
    assert [answer["stale"] for answer in stale] == [True] * len(paths)


async def test_a_client_sees_its_own_commands_at_once(control: Control) -> None:
    """After `pause`, `resume`, `update_weights` and `load_lora` return, the client's view of the fleet has them."""
    async with control(2) as c:
        rb = c.http.rb
        with late_presence(rb):
            await rb.fleet.pause()
            assert {worker.state for worker in rb.fleet.workers} == {WorkerState.PAUSED}
            assert {worker.state for worker in (await rb.fleet.state()).workers} == {WorkerState.PAUSED}
            await rb.fleet.resume()
            assert {worker.state for worker in rb.fleet.workers} == {WorkerState.SERVING}
            await rb.fleet.update_weights(c.root / "two", version=7)
            assert {worker.weight_version for worker in rb.fleet.workers} == {7}
            await rb.fleet.load_lora("math", c.root / "adapter", version=3)
            assert [[lora.version for lora in worker.loras] for worker in rb.fleet.workers] == [[3], [3]]
            generation = await rb.complete(greedy(2, 2, lora="math"))
            assert not (await rb.fleet.state()).stale

    assert (generation.lora, len(generation.token_ids)) == ("math", 2)


# Faults of the caller are answered 4xx with the field's name, also if a worker finds them.


NAMES = {"sampling": "", "sampling.extra": "", "sampling.extra.structured_outputs": "response_format"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("sampling.extra.structured_outputs was rejected by vLLM: no grammar; allowed: see", "response_format"),
        ("sampling.allowed_token_ids allows no token that is left; allowed: others", "allowed_token_ids"),
        ("prompt_token_ids[3] is -1; allowed: others", "prompt_token_ids[3]"),
        ("the worker rejects it", None),
    ],
)
def test_an_error_of_a_worker_names_the_field_of_the_route(message: str, param: str | None) -> None:
    """If a worker rejects a field, `error.param` is the route's name of the field and begins the message."""
    with pytest.raises(HttpError) as raised, named_errors(lambda: NAMES):
        raise RequestError(code=ErrorCode.INVALID_REQUEST, message=message, request_id="r")
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, "invalid_request")
    assert raised.value.message.startswith(param or message)
    with pytest.raises(HttpError) as raised, named_errors(lambda: NAMES):
        raise RequestError(code=ErrorCode.ENGINE_ERROR, message=message, request_id="r")
    assert (raised.value.status, raised.value.param) == (502, None)


async def test_a_command_that_no_worker_can_apply_is_4xx(control: Control) -> None:
    """A missing directory of weights is 400 and not 502, under each name."""
    async with control() as c:
        absent = str(c.root / "absent")
        found = [
            await c.post("/update_weights", {"weight_dir": absent}),
            await c.post("/v1/rl/update_weights", {"path": absent, "version": 9}),
        ]
    assert [(status, answer["error"]["code"]) for status, answer in found] == [(400, "bad_source")] * 2
