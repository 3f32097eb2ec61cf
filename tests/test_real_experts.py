"""What a vLLM worker counts of its experts: that of the client's rows, without cached prefixes, by version."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rollbus
from rollbus import Generation
from rollbus.bus.protocol.telemetry.expert_window import VersionLoad, imbalance
from tests.support.expert_counts import asked_until, planes_of
from tests.support.real_fleet import WEIGHT_VERSION, RealWorkers, greedy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXPERTS, TOP_K = 16, 4
"""Of the tiny MoE."""


@pytest.fixture
def own_worker(nats_url: str, tiny_moe_float32: Path) -> Iterator[RealWorkers]:
    """A worker that no other test asks for anything, as it counts all of its tokens."""
    workers = RealWorkers(nats_url, tiny_moe_float32)
    yield workers
    workers.stop()


def collapsed(model: Path) -> Path:
    """The same model, beside it, whose routers like all experts alike, and so choose the same ones for each token."""
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
    """A version has the counts of the rows of these results."""
    wanted = planes_of(results, EXPERTS)
    for name, plane in (("prompt", version.prompt), ("generated", version.generated)):
        np.testing.assert_array_equal(plane.counts, wanted[name])
        assert plane.computed == plane.seen == wanted[name][0].sum() // TOP_K


async def test_a_real_worker_counts_what_its_engine_computed(
    nats_url: str, own_worker: RealWorkers, tiny_moe_float32: Path
) -> None:
    """Of new prompts all, of a prompt that comes again what is not cached; collapsed weights are seen as such."""
    await own_worker.have(1)
    async with rollbus.connect(nats_url, fleet=own_worker.fleet) as rb:
        requests = [greedy(300 + seed, 10 + seed, seed) for seed in range(4)]
        fresh = [generation async for generation in rb.complete_many(requests)]
        num_generated = sum(len(result.token_ids) - 1 for result in fresh)
        answers = await asked_until(rb, lambda window: window.generated.computed == num_generated)
        assert answers.window is not None
        check(answers.window.versions[0], fresh)
        assert {result.cached_tokens for result in fresh} == {0}

        again = [await rb.complete(requests[0])]
        assert again[0].cached_tokens
        num_generated += len(again[0].token_ids) - 1
        answers = await asked_until(rb, lambda window: window.generated.computed == num_generated)
        assert answers.window is not None
        check(answers.window.versions[0], fresh + again)

        await rb.fleet.update_weights(collapsed(tiny_moe_float32), version=WEIGHT_VERSION + 1)
        after = [generation async for generation in rb.complete_many(requests)]
        num_generated += sum(len(result.token_ids) - 1 for result in after)
        answers = await asked_until(rb, lambda window: window.generated.computed == num_generated)

    assert answers.window is not None
    new, old = answers.window.versions
    assert (new.weight_version, old.weight_version) == (WEIGHT_VERSION + 1, WEIGHT_VERSION)
    check(old, fresh + again)
    check(new, after)
    healthy, worse = (imbalance(version.generated.counts, TOP_K).summary() for version in (old, new))
    assert worse.worst == EXPERTS / TOP_K
    assert worse.unused == 4 * (EXPERTS - TOP_K)
    assert healthy.max_over_mean < worse.max_over_mean
    assert healthy.entropy > worse.entropy
