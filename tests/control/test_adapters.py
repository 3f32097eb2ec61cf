"""LoRA adapters through the real command line."""

from pathlib import Path

import pytest

import rollbus
from rollbus import ErrorCode, Generation, RequestError
from rollbus.schemas.presence import LoraInfo
from tests.cli.support import run_rollbus
from tests.control.support import ask, folders, serving_here, start_here, write_adapter
from tests.support.fleet import until_worker


async def with_adapter(rb: rollbus.Client) -> Generation:
    """Return the generation of a prompt with the adapter `math`."""
    return await rb.complete(ask(lora="math"))


def tokens(generation: Generation) -> list[int]:
    """Return the token ids of a generation."""
    return [int(token_id) for token_id in generation.token_ids]


def lora_versions(generation: Generation) -> set[int]:
    """Return the adapter versions of a generation's tokens."""
    return set() if generation.lora_versions is None else {int(version) for version in generation.lora_versions}


async def test_an_adapter_is_loaded_replaced_kept_over_new_weights_and_unloaded(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An adapter is loaded, replaced under its name, kept over new weights, loaded by a late worker and unloaded.

    Each token has the version of its adapter and of its weights.
    """
    one, two = folders(tmp_path / "root")
    first = write_adapter(tmp_path / "root" / "first")
    second = write_adapter(tmp_path / "mine" / "second", module="model.layers.0.mlp.down_proj")
    async with serving_here(nats_url, fleet, one, 1) as rb:
        plain = await rb.complete(ask())
        loaded = await run_rollbus(nats_url, fleet, "load-lora", "math", str(first))
        results = [await with_adapter(rb)]
        swapped = await run_rollbus(nats_url, fleet, "load-lora", "math", str(second), "--upload", "--version", "7")
        results.append(await with_adapter(rb))
        updated = await run_rollbus(nats_url, fleet, "update-weights", str(two), "--version", "2")
        results.append(await with_adapter(rb))
        async with start_here(nats_url, fleet, "w1", one):
            await rb.fleet.wait_for_workers(2)
            late = await until_worker(rb, "w1", lambda worker: worker.loras)
        unloaded = await run_rollbus(nats_url, fleet, "unload-lora", "math")
        before = (await rb.fleet.state()).desired["m"]
        refused = [
            await run_rollbus(nats_url, fleet, "unload-lora", "unknown"),
            await run_rollbus(nats_url, fleet, "load-lora", "m", str(first)),
        ]
        after = (await rb.fleet.state()).desired["m"]
        with pytest.raises(RequestError) as caught:
            await with_adapter(rb)

    assert [ended.code for ended in (loaded, swapped, updated, unloaded)] == [0] * 4
    assert all(ended.code for ended in refused)
    assert "'unknown' is not loaded" in refused[0].stderr
    assert "'m', which is the name of a model" in refused[1].stderr
    assert after == before
    assert [lora_versions(result) for result in results] == [{1}, {7}, {7}]
    assert [set(result.weight_versions.tolist()) for result in results] == [{1}, {1}, {2}]
    assert plain.lora_versions is None
    assert len({tuple(tokens(result)) for result in (plain, *results)}) == 4
    assert late.loras == (LoraInfo(name="math", version=7),)
    assert caught.value.code is ErrorCode.UNSUPPORTED
