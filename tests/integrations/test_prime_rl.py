"""The calls of prime-rl's client, replayed in its format on the HTTP service with real vLLM workers.

Source: commit 559b44772e47 of PrimeIntellect-ai/prime-rl (0.8):

- `utils/client.py`: admin calls and scores;
- `orchestrator/watcher.py`: the order of the calls;
- `orchestrator/inference_metrics.py`: the metrics that the client reads from `/metrics`;
- `transports/weights/filesystem.py` and `utils/weights.py`: the folder of a broadcast;
- `inference/vllm/server.py`: the answers of prime-rl's own server.

Requests for tokens are those of `renderers` 0.1.12 and `verifiers` 0.4. prime-rl does not discover servers: its
configuration names them, here one service for all workers.
"""

import asyncio
import itertools
import math
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import rollbus
from tests.http.support import Http, http_before, rows_of
from tests.support.checkpoints import make_tiny_lora
from tests.support.fleet import until_state
from tests.support.real_fleet import RealWorkers, greedy, prompt
from tests.support.requests import TOLERANCE
from tests.support.waits import in_trainers_run, patient

pytestmark = [pytest.mark.vllm, in_trainers_run]

NUM_LAYERS, TOP_K = 4, 4
LONG = 2000
"""Number of tokens of a request that runs while weights are replaced."""
READY, STABLE = "NCCL_READY", "STABLE"
"""Empty files in the folder of a broadcast.

With every transport the client creates the first file and the trainer the second.
"""


class Admin:
    """prime-rl's admin client at the root of the service, with a timeout for each call and its errors."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(
            base_url=f"{url}/v1".rstrip("/").removesuffix("/v1"),
            limits=httpx.Limits(max_connections=4, max_keepalive_connections=1),
            timeout=httpx.Timeout(None),
        )

    async def post(self, path: str, *, read_s: float = 300.0, **body: Any) -> dict[str, Any]:
        """Send a call and return its answer. Raise an error if it fails."""
        timeout = httpx.Timeout(connect=patient(10.0), read=read_s, write=60.0, pool=10.0)
        answer = await self.client.post(path, timeout=timeout, **body)
        answer.raise_for_status()
        return dict(answer.json())

    async def update(self, weight_dir: Path | None) -> dict[str, Any]:
        """Run the client's whole update: pause, new weights, and resume, also after an error."""
        await self.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            if weight_dir is not None:
                make_ready(weight_dir)
            body = {"weight_dir": None if weight_dir is None else weight_dir.as_posix()}
            return await self.post("/update_weights", json=body, read_s=720.0)
        finally:
            await self.post("/resume")

    async def is_ready(self, model: str) -> bool:
        """Return True if the service is healthy and lists the model. The client waits for this when it starts."""
        (await self.client.get("/health")).raise_for_status()
        cards = (await self.client.get("/v1/models")).json()["data"]
        return any(card["id"] == model for card in cards)

    async def engines(self) -> dict[str, dict[str, float | str]]:
        """Return the client's values from `/metrics`: those of each engine by vLLM's names, and its cache's labels."""
        answer = await self.client.get("/metrics", timeout=patient(5.0))
        answer.raise_for_status()
        found: dict[str, dict[str, float | str]] = {}
        for family in text_string_to_metric_families(answer.text):
            if not family.name.startswith("vllm:") or family.type not in ("counter", "gauge", "histogram"):
                continue
            for sample in family.samples:
                engine = found.setdefault(sample.labels.get("engine", "0"), {})
                if family.name == "vllm:cache_config_info":
                    engine.update(sample.labels)
                else:
                    engine[sample.name.removeprefix("vllm:")] = sample.value
        return found


@asynccontextmanager
async def trainer(nats_url: str, fleet: str, count: int) -> AsyncIterator[tuple[Admin, Http, str]]:
    """Run a service for a fleet with so many workers, and yield an admin client and the name of the model."""
    async with http_before(nats_url, fleet) as http:
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers(count)
        admin = Admin(http.url)
        async with admin.client:
            yield admin, http, http.own.fleet.workers[0].model


async def turn(  # noqa: PLR0913 - the fields of its body
    admin: Admin,
    model: str,
    token_ids: list[int],
    *,
    salt: int,
    max_tokens: int = 16,
    min_tokens: int = 0,
    start: int | None = None,
) -> dict[str, Any]:
    """Run one turn of a rollout: send the renderer's request, and check the answer's only choice as the client does.

    Args:
        salt: the version of the policy at the start of the rollout's group.
        start: first position whose routed experts are requested; set from the second turn on.
    """
    sampling: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "max_tokens": max_tokens, "ignore_eos": True}
    sampling |= {"min_tokens": min_tokens, "stop_token_ids": [1], "logprobs": 1, "skip_special_tokens": False}
    if start is not None:
        sampling["routed_experts_prompt_start"] = start
    body = {"model": model, "token_ids": token_ids, "sampling_params": sampling, "cache_salt": str(salt)}
    headers = {"X-Session-ID": "4f1c", "Authorization": "Bearer EMPTY"}
    answer = await admin.client.post("/inference/v1/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    ids = choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{one}" for one in ids]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0 for entry in content)
    routed = choice["routed_experts"]
    if routed is not None:
        # The client cuts the data out of the answer's bytes at this prefix.
        assert b'"routed_experts":{"data":"' in answer.content
        assert routed["start"] == (start or 0)
        assert rows_of(routed).shape == (len(token_ids) + len(ids) - 1 - routed["start"], NUM_LAYERS, TOP_K)
        assert routed["dtype"] == "uint8"
    return dict(choice)


def make_ready(folder: Path) -> None:
    """Prepare the folder of a broadcast before an update, as the client does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / READY).touch()


def broadcast(checkpoint: Path, step: int) -> Path:
    """Write the folder that the trainer writes for a step: the tensors, no configuration, and finally an empty file."""
    folder = checkpoint.parent / "broadcasts" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*.safetensors*"):
        shutil.copy(file, folder)
    (folder / STABLE).touch()
    return folder


@pytest.fixture
def old(nats_url: str, tiny_moes: tuple[Path, Path], tmp_path: Path) -> Iterator[RealWorkers]:
    """Workers with version 0 of a policy, as an orchestrator expects them at its start."""
    workers = RealWorkers(nats_url, tiny_moes[1], version=0, cache=tmp_path / "cache")
    yield workers
    workers.stop()


@pytest.mark.routing
async def test_the_client_of_prime_rl_accepts_each_answer_through_an_update(
    nats_url: str, old: RealWorkers, real_fleet: str, tiny_moe_float32: Path
) -> None:
    """From its start to the turn after an update, prime-rl's client accepts each answer.

    The answers after the update come from the new weights.
    """
    names = await old.have(2)
    prompts = [prompt(20 + seed, seed).tolist() for seed in range(6)]
    async with trainer(nats_url, old.fleet, 2) as (admin, http, model):
        assert await admin.is_ready(model)
        engines = await admin.engines()
        before = [await turn(admin, model, one, salt=0) for one in prompts]
        second = [*prompts[0], *before[0]["token_ids"], 11, 12]
        await turn(admin, model, second, salt=0, start=len(second) - 3)

        async with asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(turn(admin, model, prompts[0], salt=0, max_tokens=LONG, min_tokens=LONG))
            tagged = tasks.create_task(http.rb.complete(greedy(30, LONG)))
            await until_state(http.own, lambda state: sum(worker.in_flight for worker in state.workers) == 2)
            updated = await admin.update(broadcast(tiny_moe_float32, 1))
        # After a timeout, the client repeats a call that may have succeeded.
        repeated = await admin.update(broadcast(tiny_moe_float32, 1))

        after = [await turn(admin, model, one, salt=1) for one in prompts]
        newest = await http.rb.complete(greedy(30, 8))
        told = (await admin.client.get("/weight_info")).json()
        scored = await scores(admin, model, second)
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        fresh = [await rb.complete(greedy(20 + seed, 16, seed)) for seed in range(6)]

    # The queue has its own entry, so that the client sends no more work while requests wait for a worker.
    assert engines.keys() == {*names, "queue."}
    assert engines["queue."].keys() == {"num_requests_waiting"}
    for name in names:
        values = engines[name]
        assert {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"} <= values.keys()
        assert {"num_preemptions_total", "prefix_cache_hits_total", "prefix_cache_queries_total"} <= values.keys()
        # The client's initial concurrency is this value divided by `max_model_len`.
        assert int(values["kv_cache_size_tokens"]) >= 8192
    assert (updated["status"], updated["weight_version"], repeated["weight_version"]) == ("ok", 1, 2)
    assert len(rollout.result()["token_ids"]) == LONG
    for versions in (tagged.result().weight_versions.tolist(), rollout.result()["weight_versions"]):
        assert {0, 1} <= set(versions) <= {0, 1, 2}
        assert all(a <= b for a, b in itertools.pairwise(versions))
    assert {version for choice in before for version in choice["weight_versions"]} == {0}
    assert {version for choice in after for version in choice["weight_versions"]} == {2}
    assert {*newest.weight_versions.tolist()} == {2}
    assert told["version"] == 2
    for choice, expected in zip(after, fresh, strict=True):
        assert choice["token_ids"] == expected.token_ids.tolist()
        assert expected.logprobs is not None
        given = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        np.testing.assert_allclose(given, expected.logprobs, atol=TOLERANCE)
    assert [choice["token_ids"] for choice in before] != [choice["token_ids"] for choice in after]
    assert len(scored) == len(second)
    assert scored[0] == 0.0
    assert all(math.isfinite(score) and score < 0 for score in scored[1:])


async def scores(admin: Admin, model: str, token_ids: list[int]) -> list[float]:
    """Return the log probability of each token of a prompt, as for a reference policy; 0.0 for the first token."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": model, "token_ids": token_ids, "sampling_params": sampling}
    answer = await admin.post("/inference/v1/generate", json=body)
    return [next(iter(entry.values()))["logprob"] if entry else 0.0 for entry in answer["prompt_logprobs"]]


async def test_unsupported_broadcasts_and_missing_folders_are_rejected_by_name(
    nats_url: str, real_fleet: str, tiny_moe_float32: Path
) -> None:
    """Broadcasts by NCCL and NIXL and a missing folder are rejected.

    Each error names what is rejected, and the workers keep their weights.
    """
    async with trainer(nats_url, real_fleet, 1) as (admin, http, model):
        (worker,) = http.own.fleet.workers
        known = await turn(admin, model, prompt(20, 0).tolist(), salt=0)
        group = {"host": "10.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 2, "timeout": 1200}
        errors = []
        for body in (
            {**group, "quantize_in_weight_transfer": False},
            {**group, "quantize_in_weight_transfer": False, "session_id": "run"},
        ):
            with pytest.raises(httpx.HTTPStatusError) as error:
                await admin.post("/init_broadcaster", json=body)
            errors.append(error.value.response)
        for folder in (None, tiny_moe_float32.parent / "broadcasts" / "step_9"):
            # With NCCL, the folder has no tensors.
            with pytest.raises(httpx.HTTPStatusError) as error:
                await admin.update(folder)
            errors.append(error.value.response)
        again = await turn(admin, model, prompt(20, 0).tolist(), salt=0)
        told = (await admin.client.get("/weight_info")).json()

    # The client interprets 404 as a server that needs no broadcaster, so the status must not be 404.
    assert [error.status_code for error in errors] == [501, 501, 400, 400]
    messages = [error.json()["error"]["message"] for error in errors]
    assert all("NCCL" in message and "filesystem" in message for message in messages[:2])
    assert "weight_dir" in messages[2]
    assert "step_9" in messages[3]
    assert again["token_ids"] == known["token_ids"]
    assert told["version"] == worker.weight_version


async def test_prime_rl_can_replace_an_adapter_under_the_same_name(nats_url: str, policy: Path, tmp_path: Path) -> None:
    """prime-rl can replace an adapter under the same name without a pause.

    A missing folder is 404, after which its client retries.
    """
    first, second = (make_tiny_lora(policy.parent / f"broadcasts-{seed}", policy, seed=seed) for seed in (1, 2))
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    workers = RealWorkers(nats_url, policy, version=0, cache=tmp_path / "cache", engine_args=arguments)
    try:
        await workers.have(2)
        async with trainer(nats_url, workers.fleet, 2) as (admin, http, model):
            plain = await turn(admin, model, prompt(20, 0).tolist(), salt=0)
            said: list[dict[str, Any]] = []
            with pytest.raises(httpx.HTTPStatusError) as error:
                await load_adapter(admin, policy.parent / "broadcasts-3")
            for folder in (first, second, first):
                await load_adapter(admin, folder)
                said.append(await turn(admin, "r4", prompt(20, 0).tolist(), salt=len(said) + 1))
            is_ready = await admin.is_ready("r4")
            base = await turn(admin, model, prompt(20, 0).tolist(), salt=0)
            state = await http.rb.fleet.state()
            await admin.client.post("/v1/unload_lora_adapter", json={"lora_name": "r4"})
    finally:
        workers.stop()

    assert error.value.response.status_code == 404
    assert is_ready
    assert base["token_ids"] == plain["token_ids"]
    assert said[0]["token_ids"] == said[2]["token_ids"] != said[1]["token_ids"]
    assert plain["token_ids"] not in [one["token_ids"] for one in said]
    assert [[(lora.name, lora.version) for lora in worker.loras] for worker in state.workers] == [[("r4", 3)]] * 2


async def load_adapter(admin: Admin, folder: Path) -> None:
    """Load one version of the adapter as the client does."""
    body = {"lora_name": "r4", "lora_path": folder.as_posix()}
    answer = await admin.post("/load_lora_adapter", json=body, read_s=patient(30.0))
    assert answer["status"] == "ok"
