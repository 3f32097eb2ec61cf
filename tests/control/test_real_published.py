"""Published weights on a real engine: results equal exactly those of an engine that started with these weights."""

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rollbus
from rollbus import Generation
from tests.support.fleet import check_generation
from tests.support.real_fleet import RealWorkers, greedy
from tests.support.requests import expert_sets

pytestmark = pytest.mark.vllm

QUESTIONS = [greedy(20 + 9 * seed, 16, 40 + seed, request_id=f"q{seed}") for seed in range(3)]
FILE = "model.safetensors"
CHANGED = 0.03
"""The share of elements that change in each tensor."""


def trained(before: Path, folder: Path, seed: int) -> Path:
    """Write a checkpoint in which a few elements of every tensor differ, and return its folder."""
    shutil.copytree(before, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(before / FILE)
    for tensor in tensors.values():
        is_changed = torch.rand(tensor.shape, generator=generator) < CHANGED
        tensor.add_(is_changed * torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0))
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


async def answers(url: str, fleet: str) -> list[Generation]:
    """Send one question at a time to a fleet's worker: in batches, kernels add in another order."""
    async with rollbus.connect(url, fleet=fleet) as rb:
        found = [await rb.complete(question) for question in QUESTIONS]
    for question, generation in zip(QUESTIONS, found, strict=True):
        check_generation(generation, question)
    return found


def assert_exactly(received: Sequence[Generation], expected: Sequence[Generation], version: int) -> None:
    """Assert equal tokens, log probabilities and sets of experts to the last bit, with this version."""
    for mine, other in zip(received, expected, strict=True):
        assert {*mine.weight_versions.tolist()} == {version}
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_array_equal(mine.logprobs, other.logprobs)
        np.testing.assert_array_equal(expert_sets(mine.routed_experts), expert_sets(other.routed_experts))


@contextlib.contextmanager
def started_on(url: str, checkpoints: Sequence[Path], cache: Path) -> Iterator[list[RealWorkers]]:
    """Yield a fleet for each checkpoint, whose workers start with it."""
    fleets = [RealWorkers(url, checkpoint, version=0, cache=cache) for checkpoint in checkpoints]
    try:
        yield fleets
    finally:
        for fleet in fleets:
            fleet.stop()


@pytest.mark.proves("P9")
async def test_published_versions_give_the_results_of_fresh_engines(
    nats_url: str, tiny_moe_float32: Path, tmp_path: Path
) -> None:
    """After each of two deltas, a worker computes exactly the results of a fresh engine with those weights.

    The same holds for a worker that has lost its folders and begins with the anchor.
    """
    checkpoints = [tiny_moe_float32]
    for step in (1, 2):
        checkpoints.append(trained(checkpoints[-1], tmp_path / f"step-{step}", step))
    cache = tmp_path / "cache"
    with started_on(nats_url, checkpoints, cache) as (own, *fresh):
        for workers in (own, *fresh):
            await workers.have(1)
        expected = [await answers(nats_url, workers.fleet) for workers in fresh]
        async with (
            rollbus.connect(nats_url, fleet=own.fleet) as rb,
            rollbus.WeightPublisher(rb, model=tiny_moe_float32.name, checkpoint=tiny_moe_float32) as weights,
        ):
            is_anchor = [(await weights.publish(load_file(tiny_moe_float32 / FILE), version=1)).is_anchor]
            for version, (checkpoint, wanted) in enumerate(zip(checkpoints[1:], expected, strict=True), 2):
                published = await weights.publish(load_file(checkpoint / FILE), version=version)
                is_anchor.append(published.is_anchor)
                assert_exactly(await answers(nats_url, own.fleet), wanted, version)
            own.stop()
            await asyncio.to_thread(shutil.rmtree, cache)
            await own.have(1)
            assert_exactly(await answers(nats_url, own.fleet), expected[-1], version)
    assert is_anchor == [True, False, False]
