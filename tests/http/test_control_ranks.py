"""Ranks for a weight transfer: the number of ranks in a fleet, and the rank offset of each worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.http.control_support import control_http
from tests.http.support import http_before, http_service
from tests.support.fleet import synthetic_worker


async def test_ranks_are_counted_in_the_order_of_ids(nats_url: str, fleet: str) -> None:
    """Each worker has its number of ranks and an offset after those of the workers with smaller ids."""
    async with (
        synthetic_worker(nats_url, fleet, config=SyntheticConfig(world_size=3), worker_id="w1"),
        synthetic_worker(nats_url, fleet, config=SyntheticConfig(world_size=2), worker_id="w0"),
        http_before(nats_url, fleet) as http,
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


async def test_missing_ranks_are_an_error(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A worker of an earlier release gives 501, several models without a choice give 400, and no workers give 503."""
    async with http_service(nats_url, fleet, config=SyntheticConfig(world_size=None)) as http:
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


async def test_each_worker_gets_its_own_offset(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request gives each worker its own rank offset.

    A command to named workers, or without ranks, stays unchanged.
    """
    given: dict[int, list[Mapping[str, Any]]] = {}

    async def note(engine: SyntheticEngine, info: Mapping[str, Any]) -> None:
        given.setdefault(id(engine), []).append(info)

    monkeypatch.setattr(SyntheticEngine, "init_weight_transfer", note)
    url = "/init_weight_transfer_engine"
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        info = {"master_address": "h", "rank_offset": 1, "world_size": 3}
        status, answer = await c.post(url, {"init_info": info})
        named = await c.post(url, {"init_info": info, "workers": ["w1"]})
        plain = await c.post(url, {"init_info": {"a": 1}})
        told = [given[id(engine)] for engine in c.engines]
    assert (status, answer["message"], answer["complete"]) == (200, "Weight transfer initialized", True)
    assert [line["worker"] for line in answer["workers"]] == ["w0", "w1"]
    assert told == [[info, {"a": 1}], [{**info, "rank_offset": 2}, info, {"a": 1}]]
    assert (named[0], plain[0]) == (200, 200)


async def test_a_rank_offset_that_any_worker_refuses_is_502(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one worker refuses its offset, the status is 502 and the ledger has the workers of both commands."""

    async def refuse(_engine: SyntheticEngine, info: Mapping[str, Any]) -> None:
        if info["rank_offset"] == 1:
            raise RuntimeError("rank 1 is taken")

    monkeypatch.setattr(SyntheticEngine, "init_weight_transfer", refuse)
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        status, answer = await c.post("/init_weight_transfer_engine", {"init_info": {"rank_offset": 0}})
    assert (status, answer["error"]["code"]) == (502, "partial")
    assert {line["worker"]: line["result"] for line in answer["workers"]} == {"w0": "applied", "w1": "failed"}


async def test_each_service_returns_a_text_version_unchanged(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Each service returns a text version beside the numeric version. A numeric text is the version itself."""
    async with control_http(nats_url, fleet, tmp_path) as c:

        async def updated(**fields: object) -> tuple[int, str, int]:
            folder = "two" if fields.pop("two", False) else "one"
            status, answer = await c.post("/update_weights", {"weight_dir": str(c.root / folder), **fields})
            assert status == 200, answer
            info = (await c.get("/v1/rl/weight_info"))[1]
            return answer["weight_version"], info["weight_version"], info["version"]

        assert await updated(two=True, weight_version="step-42") == (2, "step-42", 2)
        async with http_before(nats_url, fleet) as other:
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


async def test_a_text_version_is_refused_if_a_worker_of_an_earlier_release_runs(nats_url: str, fleet: str) -> None:
    """If a worker of an earlier release cannot decode a text version, the status is 400 with field and workers.

    The desired state records nothing.
    """
    async with http_service(nats_url, fleet, config=SyntheticConfig(version_labels=False)) as http:
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


async def test_the_routes_of_dynamo_list_load_replace_and_unload_adapters(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """Dynamo's routes list, load, replace and unload adapters, also with slashes in the name."""
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
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
