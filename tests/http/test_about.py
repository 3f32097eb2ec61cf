"""Routes that describe the service and its engines to clients of vLLM and OpenAI, and to browsers."""

import platform
from pathlib import Path

import openai
import pytest

import rollbus
from rollbus.frontend.http.status import parallel_config
from tests.http.control_support import control_http
from tests.http.openai_support import client_of
from tests.http.support import http_before, http_service


async def test_versions_load_and_settings(nats_url: str, fleet: str) -> None:
    """The routes give engine versions under vLLM's names and the workers' presence, and nothing of the environment."""
    async with http_service(nats_url, fleet) as http:
        client = http.client
        version = (await client.get("/version")).json()
        load = (await client.get("/load")).json()
        text = (await client.get("/server_info")).json()
        as_json = (await client.get("/server_info", params={"config_format": "json"})).json()
        wrong = await client.get("/server_info", params={"config_format": "yaml"})
        pings = [await client.get("/ping"), await client.post("/ping")]
        [worker] = (await http.rb.fleet.state()).workers
    assert version == {"version": "1", "engines": ["synthetic 1"], "rollbus": rollbus.__version__}
    assert load == {"server_load": 0}
    assert text["vllm_config"].startswith(f"{worker.worker}: model='synthetic'")
    assert as_json["vllm_config"][worker.worker]["world_size"] == 1
    assert (text["vllm_env"], text["system_env"]["python"]) == ({}, platform.python_version())
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")
    assert [(ping.status_code, ping.content) for ping in pings] == [(200, b""), (200, b"")]


def test_engines_that_agree_have_one_parallel_config() -> None:
    """The sizes are in the settings if all engines announce the same."""
    one = "vllm-0.30.0 cuda-NVIDIA-H100 tp2-pp3-dp4 bfloat16 kv-auto"
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}
    assert parallel_config([one, one]) == {**sizes, "world_size": 6, "world_size_across_dp": 24}
    for other in (one.replace("tp2", "tp4"), "synthetic 1"):
        assert parallel_config([one, other]) is None
    assert parallel_config([]) is None


async def test_the_service_is_the_address_of_all_workers(nats_url: str, fleet: str) -> None:
    """`/workers` has this service once, by the name in the request, because a command reaches the whole fleet."""
    async with http_service(nats_url, fleet) as http:
        answer = await http.client.get("/workers", headers={"Host": "localhost:8000"})
        [worker] = (await http.rb.fleet.state()).workers
        [own] = (await http.client.get("/workers")).json()["workers"]
        aborted = await http.client.post(f"{own['url']}/abort_requests", json={})
        load = await http.client.get(f"{own['url']}/load?include_inflight=true&inflight_limit=100")
    known = {"models": ["synthetic"], "workers": [worker.worker], "is_healthy": True, "load": 0}
    assert answer.json() == {"workers": [{"url": "http://localhost:8000", **known}], "total": 1}
    assert own == {"url": http.url, **known}
    assert (aborted.json()["aborted"], load.json()["server_load"]) == (0, 0)


async def test_a_fleet_without_workers_has_no_release(nats_url: str, fleet: str) -> None:
    """Without workers, `/version` gives 503, because it is the version of the engines. The service is still alive."""
    async with http_before(nats_url, fleet) as http:
        assert (await http.client.get("/version")).status_code == 503
        assert (await http.client.get("/ping")).status_code == 200
        assert (await http.client.get("/server_info")).json()["vllm_config"] == ""


async def test_one_model_is_retrieved(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`models.retrieve` of the OpenAI client finds names with slashes, and an unknown model is a `NotFoundError`."""
    async with (
        control_http(nats_url, fleet, tmp_path, models=("org/model-1.5",)) as c,
        client_of(c.http) as client,
    ):
        found = await client.models.retrieve("org/model-1.5")
        [listed] = (await client.models.list()).data
        with pytest.raises(openai.NotFoundError, match=r"'org/other' is unknown; allowed: org/model-1\.5"):
            await client.models.retrieve("org/other")
    assert found.model_dump(exclude={"created"}) == listed.model_dump(exclude={"created"})
