"""A vLLM worker counts its experts by version; the counts equal the client's rows without cached prefixes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rollbus
from rollbus import Generation
from rollbus.bus.protocol.telemetry.experts import VersionLoad, imbalance
from tests.support.fleet import asked_until, planes_of
from tests.support.real_fleet import WEIGHT_VERSION, RealWorkers, greedy

pytestmark = pytest.mark.vllm

EXPERTS, TOP_K = 16, 4
"""Values of the tiny MoE."""


@pytest.fixture
def own_worker(nats_url: str, tiny_moe_float32: Path) -> Iterator[RealWorkers]:
    """Run a worker for this test only, because the worker counts all its tokens."""
    workers = RealWorkers(nats_url, tiny_moe_float32)
    yield workers
    workers.stop()


def collapsed(model: Path) -> Path:
    """Copy the model and give each router equal weights for all experts, so that each token uses the same experts."""
    from safetensors.numpy import load_file, save_file

    folder = model.with_name(f"{model.name}-collapsed")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    gates = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert gates
    for name in gates:
        tensors[name] = np.repeat(tensors[name][:1], len(tensors[name]), axis=0)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def check(version: VersionLoad, results: list[Generation]) -> None:
    """Assert that the counts of a version equal the rows of these results."""
    wanted = planes_of(results, EXPERTS)
    for name, plane in (("prompt", version.prompt), ("generated", version.generated)):
        np.testing.assert_array_equal(plane.counts, wanted[name])
        assert plane.computed == plane.seen == wanted[name][0].sum() // TOP_K


async def test_a_real_worker_counts_the_tokens_that_its_engine_computed(
    nats_url: str, own_worker: RealWorkers, tiny_moe_float32: Path
) -> None:
    """New prompts count completely, repeated prompts without their cached tokens, and collapsed weights are visible."""
    await own_worker.have(1)
    async with rollbus.connect(nats_url, fleet=own_worker.fleet) as rb:
        requests = [greedy(300 + seed, 10 + seed, seed) for seed in range(4)]
        fresh = [generation async for generation in rb.complete_many(requests)]
        num_generated = sum(len(result.token_ids) - 1 for result in fresh)
        answers = await asked_until(rb, lambda window: window.generated.computed == num_generated)
        check(answers.window.versions[0], fresh)
        assert {result.cached_tokens for result in fresh} == {0}

        again = [await rb.complete(requests[0])]
        assert again[0].cached_tokens
        num_generated += len(again[0].token_ids) - 1
        answers = await asked_until(rb, lambda window: window.generated.computed == num_generated)
        check(answers.window.versions[0], fresh + again)

        await rb.fleet.update_weights(collapsed(tiny_moe_float32), version=WEIGHT_VERSION + 1)
        after = [generation async for generation in rb.complete_many(requests)]
        num_generated += sum(len(result.token_ids) - 1 for result in after)
        answers = await asked_until(rb, lambda window: window.generated.computed == num_generated)

    new, old = answers.window.versions
    assert (new.weight_version, old.weight_version) == (WEIGHT_VERSION + 1, WEIGHT_VERSION)
    check(old, fresh + again)
    check(new, after)
    healthy, worse = (imbalance(version.generated.counts, TOP_K).summary() for version in (old, new))
    assert worse.worst == EXPERTS / TOP_K
    assert worse.unused == 4 * (EXPERTS - TOP_K)
    assert healthy.max_over_mean < worse.max_over_mean
    assert healthy.entropy > worse.entropy
