"""prime-rl's update with the directory of an adapter: the adapter answers under the name of the model."""

from pathlib import Path
from typing import Any

import pytest

from rollbus import Generation
from rollbus.bus.client.generation import Group
from rollbus.schemas.errors import RequestTimeout
from tests.control.support import write_adapter
from tests.http.control_support import ControlHttp, control_http, in_flight
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_state, until_worker
from tests.support.requests import greedy
from tests.support.waits import until_true


def versions(generation: Generation) -> tuple[set[int], set[int] | None]:
    """Return the versions of the weights and of the adapter."""
    loras = generation.lora_versions
    return set(generation.weight_versions.tolist()), None if loras is None else set(loras.tolist())


async def update(c: ControlHttp, name: str, **fields: Any) -> int:
    """Update to a directory. Return the answered version."""
    status, body = await c.post("/update_weights", {"weight_dir": str(c.root / name), **fields})
    assert status == 200, body
    return int(body["weight_version"])


async def test_an_adapter_in_an_update_answers_under_the_models_name(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An adapter in prime-rl's update answers the requests for the model, also those in flight and at a late worker.

    Its versions continue those of the weights. A later update by a checkpoint ends it.
    """
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        write_adapter(c.root / "second", module="model.layers.0.mlp.down_proj")
        rb = c.http.rb
        plain = await rb.complete(greedy(1, 8))
        async with in_flight(c.http) as chunks:
            await until_true(lambda: chunks)
            answered = [await update(c, "adapter")]
            await until_true(lambda: chunks[-1].lora_version == 2)
            answered.append(await update(c, "second"))
            await until_true(lambda: chunks[-1].lora_version == 3)
        found = [await rb.complete(greedy(1, 8)) for _ in range(6)]
        body = {"model": "synthetic", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        http = await c.post("/inference/v1/generate", body)
        listed = await c.get("/v1/models")
        info = await c.get("/weight_info")
        await rb.complete(greedy(1, 2, min_weight_version=3))
        late: dict[str, Any] = {"model_path": str(c.root / "one"), "weight_roots": (str(c.root),), "weight_version": 1}
        late |= {"cache_dir": str(tmp_path / "cache"), "model": "synthetic"}
        async with synthetic_worker(nats_url, fleet, worker_id="late", **late):
            await until_worker(c.http.own, "late", lambda worker: worker.served_version == 3)
            found += [await rb.complete(greedy(1, 8)) for _ in range(6)]
        answered.append(await update(c, "two"))
        after = await rb.complete(greedy(1, 8))
        state = await until_state(c.http.own, lambda state: not any(worker.loras for worker in state.workers))

    assert answered == [2, 3, 4]
    assert {worker.weight_version for worker in state.workers} == {4}
    assert (versions(plain), versions(after)) == (({1}, None), ({4}, None))
    assert all(versions(result) == ({1}, {3}) for result in found)
    assert len({tuple(result.token_ids.tolist()) for result in found}) == 1
    assert found[0].token_ids.tolist() != plain.token_ids.tolist()
    group = Group(key=None, request=found[0].request, generations=tuple(found), steps=1, error=None)
    assert group.oldest_version == 3
    assert (http[0], http[1]["lora"]) == (200, None), http
    assert [model["id"] for model in listed[1]["data"]] == ["synthetic"]
    assert info[1] == {"weight_version": "3", "version": 3}


async def test_an_unload_ends_the_adapter_under_the_models_name(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An unload of the model's name ends the adapter, and requests in flight continue on the weights."""
    async with control_http(nats_url, fleet, tmp_path) as c, in_flight(c.http) as chunks:
        assert await update(c, "adapter", version=9) == 9
        again = await update(c, "adapter", version=9)
        await until_true(lambda: chunks and chunks[-1].lora_version == 9)
        unloaded = await c.post("/unload_lora_adapter", {"lora_name": "synthetic"})
        await until_true(lambda: chunks[-1].lora_version is None)
        after = await c.http.rb.complete(greedy(1, 4))
        with pytest.raises(RequestTimeout, match="the newest version of a serving worker is 1"):
            await c.http.rb.complete(greedy(1, 4, min_weight_version=2, timeout_s=0.5))
        missing = await c.post("/unload_lora_adapter", {"lora_name": "synthetic"})

    assert again == 9
    assert (unloaded[0], missing[0]) == (200, 404)
    assert versions(after) == ({1}, None)


async def test_only_prime_rls_update_takes_an_adapter_for_the_weights(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """Other routes reject an adapter for the weights, and the model's name for an adapter, by name."""
    async with control_http(nats_url, fleet, tmp_path) as c:
        path = str(c.root / "adapter")
        own = await c.post("/v1/rl/update_weights", {"path": path})
        named = await c.post("/load_lora_adapter", {"lora_name": "synthetic", "lora_path": path})
        useless = await c.post("/update_weights", {"weight_dir": path, "mode": "abort"})
        state = await c.http.own.fleet.state()

    assert (own[0], own[1]["error"]["code"]) == (400, "is_adapter")
    assert "load it with load_lora" in own[1]["error"]["message"]
    assert (named[0], named[1]["error"]["param"]) == (400, "lora_name")
    assert (useless[0], useless[1]["error"]["param"]) == (400, "mode")
    assert not state.desired
