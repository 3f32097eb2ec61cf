"""The calls of vime, replayed in its format on the HTTP service. vime has no release on PyPI and did not run here.

Source: commit 2b83ea209634051243693e8186f45f449acb4cd1 of vllm-project/vime:

- `vime/rollout/vllm_rollout.py`: the request for tokens, what is read of its answer, and the abort of a rollout;
- `vime/backends/vllm_utils/server_control.py`: aborts until a server is idle;
- `vime/backends/vllm_utils/external.py`: the settings of engines that vime has not started (commit 3c06ae5);
- `vime/backends/vllm_utils/vllm_engine.py`: how an engine joins the router, and new weights through a folder.

vime gets the address of the service as router and as engine: `--vllm-router-ip`, `--vllm-router-port`,
`--rollout-external-engine-addrs`.
"""

import asyncio
import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollbus.frontend.http import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Http, http_before, http_service
from tests.support.fleet import until_state
from tests.support.real_fleet import RealWorkers, greedy, prompt
from tests.support.requests import TOLERANCE, expert_sets

NPY = Settings(routed_experts_npy=True)
"""The service runs with `--routed-experts-npy`: vime sends no field for it."""
NUM_LAYERS, TOP_K = 4, 4
LONG = 8000


async def generate(http: Http, model: str, tokens: list[int], *, start: int = 0, **changes: Any) -> dict[str, Any]:
    """Send the request for the rest of a sample, and return what vime reads of the answer."""
    sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "logprobs": 1, "top_k": -1}
    sampling |= {"seed": 7, "skip_special_tokens": False, "spaces_between_special_tokens": False, **changes}
    if start:
        sampling["routed_experts_prompt_start"] = start
    body = {"model": model, "token_ids": tokens, "sampling_params": sampling}
    answer = await http.client.post("/inference/v1/generate", json=body, headers={"x-session-id": "4f1c"})
    assert answer.status_code == 200, answer.text
    output = answer.json()
    choice = output["choices"][0]
    new = choice["token_ids"]
    logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"].encode("ascii"), validate=True)))
    assert len(new) == len(logprobs)
    assert rows.shape == (len(tokens) - start + len(new) - 1, NUM_LAYERS, TOP_K)
    assert output["usage"]["prompt_tokens"] == len(tokens)
    assert output["usage"]["completion_tokens"] == len(new)
    return {"tokens": new, "logprobs": logprobs, "rows": rows, "finish": choice["finish_reason"], "whole": output}


async def abort_until_idle(http: Http) -> list[int]:
    """Abort all requests of each address until it reports none, and return the counts."""
    answer = (await http.client.get("/workers")).json()
    counts: list[int] = []
    for url in [worker["url"] for worker in answer["workers"]]:
        while not counts or counts[-1]:
            assert (await http.client.post(f"{url.rstrip('/')}/abort_requests", json={})).is_success
            load = (await http.client.get(f"{url.rstrip('/')}/load?include_inflight=true&inflight_limit=100")).json()
            counts.append(load["server_load"])
    return counts


def flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as vime compares them: the fields of all sections at the top."""
    found = dict(settings)
    for section in settings["vllm_config"].values():
        if isinstance(section, dict):
            for name, value in section.items():
                found.setdefault(name, value)
    return found


async def join(http: Http) -> dict[str, Any]:
    """Read the settings of the external engine, and register it at the router. Return the settings."""
    answer = await http.client.get("/server_info?config_format=json")
    answer.raise_for_status()
    (await http.client.post("/workers", json={"url": http.url, "worker_type": "regular"})).raise_for_status()
    return flatten(answer.json())


async def update(http: Http, folder: Path, version: str) -> str:
    """Replace the weights as vime does with a checkpoint on disk, and return the version that it reads then."""
    for path, params, body in (
        ("/pause", {"mode": "keep", "clear_cache": "false"}, {}),
        ("/reset_prefix_cache", {"reset_running_requests": True}, None),
        (
            "/collective_rpc",
            None,
            {"method": "reload_weights", "kwargs": {"weights_path": str(folder), "is_checkpoint_format": True}},
        ),
        ("/update_weight_version", None, {"new_version": version}),
        ("/resume", None, {}),
    ):
        answer = await http.client.post(path, params=params, json=body)
        assert answer.status_code == 200, (path, answer.text)
        if path == "/reset_prefix_cache":
            assert answer.json()["success"]
    text: str = (await http.client.get("/weight_info")).json()["weight_version"]
    return text


@pytest.fixture
def old(nats_url: str, tiny_moes: tuple[Path, Path], tmp_path: Path) -> Iterator[RealWorkers]:
    """Workers with version 0 of a policy."""
    workers = RealWorkers(nats_url, tiny_moes[1], version=0, cache=tmp_path / "cache")
    yield workers
    workers.stop()


@pytest.mark.vllm
@pytest.mark.routing
async def test_the_calls_of_vime_on_real_workers_through_a_killed_worker_and_new_weights(
    nats_url: str, old: RealWorkers, tiny_moes: tuple[Path, Path]
) -> None:
    """From the start to answers of new weights, each answer has the form that vime reads, and the bus's own values."""
    await old.have(2)
    folder = tiny_moes[0].parent / "vime" / "weight_v000001"
    shutil.copytree(tiny_moes[0], folder, dirs_exist_ok=True)
    async with http_before(nats_url, old.fleet, NPY) as http:
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers(2)
        model = http.own.fleet.workers[0].model
        settings = await join(http)
        tokens = prompt(20, 0).tolist()
        alone = await http.rb.complete(greedy(20, 16, 0))
        first = await generate(http, model, tokens, temperature=0.0, ignore_eos=True)
        then = await generate(http, model, [*tokens, *first["tokens"], 11], start=len(tokens) + 15)
        async with asyncio.TaskGroup() as tasks:
            long = [
                tasks.create_task(generate(http, model, tokens, max_tokens=LONG, min_tokens=LONG, seed=seed))
                for seed in range(4)
            ]
            await until_state(http.own, lambda state: [one.in_flight > 0 for one in state.workers] == [True, True])
            process = next(iter(old.living.values()))
            process.kill()
            process.wait()
            # The worker is lost when its lease expires, and its requests resume.
            await until_state(http.own, lambda state: [one.in_flight for one in state.workers] == [4])
            version = await update(http, folder, "1")
            counts = await abort_until_idle(http)
        cut = [task.result() for task in long]
        rest = await generate(http, model, [*tokens, *cut[0]["tokens"]], start=len(cut[0]["rows"]), max_tokens=4)
        fresh = await http.rb.complete(greedy(20, 16, 0))
        after = await generate(http, model, tokens, temperature=0.0, ignore_eos=True)

    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes", "node_rank")
    assert [settings[name] for name in sizes] == [1, 1, 1, 1, 0]
    assert settings["enable_return_routed_experts"] is True
    assert (version, counts[-1]) == ("1", 0)
    for answer, expected in ((first, alone), (after, fresh)):
        assert answer["tokens"] == expected.token_ids.tolist()
        np.testing.assert_allclose(answer["logprobs"], expected.logprobs, atol=TOLERANCE)
        np.testing.assert_array_equal(expert_sets(answer["rows"]), expert_sets(expected.routed_experts))
    assert first["tokens"] != after["tokens"]
    assert first["finish"] == "length"
    # vime reads one version for an answer, if there is one. The service has a version for each token.
    for answer, expected_version in ((first, 0), (after, 1)):
        assert answer["whole"].get("weight_version") is None
        assert set(answer["whole"]["choices"][0]["weight_versions"]) == {expected_version}
    assert then["finish"] in {"length", "stop"}
    for answer in cut:
        # An aborted answer keeps its tokens and rows, from which vime continues.
        assert answer["finish"] == "abort"
        assert 0 < len(answer["tokens"]) < LONG
    assert len(rest["tokens"]) <= 4


async def test_other_engines_and_other_methods_are_rejected(nats_url: str, fleet: str) -> None:
    """Only the service itself joins, only `reload_weights` is called, and a version must be that of the weights."""
    async with http_service(nats_url, fleet, NPY, config=SyntheticConfig(), weight_version=3) as http:

        async def post(path: str, body: object) -> httpx.Response:
            return await http.client.post(path, json=body)

        rpc, weights = "/collective_rpc", {"weights_path": "/w", "is_checkpoint_format": True}
        wrong = [
            await post("/workers", {"url": "http://10.0.0.9:8000", "worker_type": "regular"}),
            await post("/workers", {"url": http.url, "worker_type": "prefill"}),
            await post("/workers", {"url": http.url, "bootstrap_port": 9}),
            await post(rpc, {"method": "reload_weights", "kwargs": {}}),
            await post(rpc, {"method": "reload_weights", "kwargs": {**weights, "weights_path": 3}}),
            await post(rpc, {"method": "reload_weights", "kwargs": {**weights, "is_checkpoint_format": False}}),
            await post(rpc, {"method": "reload_weights", "kwargs": {**weights, "weights_iterator": []}}),
            await post(rpc, {"method": "reload_weights", "args": [1], "kwargs": weights}),
        ]
        others = [
            await post(rpc, {"method": "pull_weights", "kwargs": {}}),
            await post(rpc, {"method": "reload_weights", "kwargs": weights}),
            await post("/update_weight_version", {"new_version": "4"}),
            await post("/update_weight_version", {"new_version": "3"}),
            await http.client.post("/update_weight_version"),
        ]

    assert [answer.status_code for answer in wrong] == [400] * len(wrong)
    assert [answer.json()["error"]["param"] for answer in wrong] == [
        "url",
        "worker_type",
        "bootstrap_port",
        "kwargs.weights_path",
        "kwargs.weights_path",
        "kwargs.is_checkpoint_format",
        "kwargs.weights_iterator",
        "args",
    ]
    assert [answer.status_code for answer in others] == [501, 400, 409, 200, 400]
    assert [answer.json()["error"]["code"] for answer in others[:3]] == ["not_served", "bad_source", "old_version"]


async def test_a_run_that_starts_again_keeps_its_numbers_as_labels(
    nats_url: str, fleet: str, tiny_moes: tuple[Path, Path]
) -> None:
    """Versions of a fleet only rise: vime's first version after 50 others is version 51, and vime reads its number."""
    folder = tiny_moes[0].parent / "vime-again" / "weight_v000001"
    shutil.copytree(tiny_moes[0], folder, dirs_exist_ok=True)
    options: dict[str, Any] = {"model_path": str(tiny_moes[1]), "weight_roots": (str(tiny_moes[0].parent),)}
    async with http_service(nats_url, fleet, NPY, config=SyntheticConfig(), weight_version=50, **options) as http:
        text = await update(http, folder, "1")
        [worker] = (await http.rb.fleet.state()).workers

    assert (text, worker.weight_version) == ("1", 51)


async def test_slime_updates_the_service_as_an_engine_of_sglang(
    nats_url: str, fleet: str, tiny_moes: tuple[Path, Path]
) -> None:
    """The settings fit; slime registers and replaces the weights under SGLang's names (commit 624b824)."""
    folder = tiny_moes[0].parent / "slime" / "weight_v000004"
    shutil.copytree(tiny_moes[0], folder, dirs_exist_ok=True)
    options: dict[str, Any] = {"model_path": str(tiny_moes[1]), "weight_roots": (str(tiny_moes[0].parent),)}
    async with http_service(nats_url, fleet, config=SyntheticConfig(), weight_version=3, **options) as http:
        settings = (await http.client.get("/server_info")).json()
        joined = await http.client.post("/workers", json={"url": http.url, "worker_type": "regular"})
        held = await http.client.post("/pause_generation", json={})
        flushed = await http.client.get("/flush_cache")
        body = {"model_path": str(folder), "weight_version": "4"}
        updated = await http.client.post("/update_weights_from_disk", json=body)
        # slime repeats nothing, but a restarted trainer writes the folder again.
        repeated = await http.client.post("/update_weights_from_disk", json=body)
        missing = await http.client.post("/update_weights_from_disk", json={"model_path": f"{folder}9"})
        went_on = await http.client.post("/continue_generation", json={})
        [worker] = (await http.rb.fleet.state()).workers
        text = (await http.client.get("/weight_info")).json()["weight_version"]

    # The values that slime expects, without `--offload-rollout` and with `--use-rollout-routing-replay`.
    assert {"enable_memory_saver": False, "enable_return_routed_experts": True}.items() <= settings.items()
    answers = [joined, held, flushed, updated, repeated, went_on]
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    assert updated.json()["success"]
    assert (missing.status_code, worker.weight_version, text) == (400, 5, "4")
