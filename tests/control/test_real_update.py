"""New weights on busy real engines: the command line, two vLLM workers and a third that starts later."""

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import Chunk, GenerateRequest, Generation
from tests.cli.support import run_rollbus
from tests.support.fleet import check_generation
from tests.support.invariants import check_stream
from tests.support.real_fleet import RealWorkers, greedy
from tests.support.requests import TOLERANCE, Stream, assert_same, expert_sets, start_stream

pytestmark = pytest.mark.vllm


class Fleets(NamedTuple):
    """The fleets and weights of this module's tests."""

    url: str
    old: RealWorkers
    """Workers that start with other weights than the new ones."""
    fresh: str
    """A fleet whose worker was started with the new weights."""
    new: Path
    """The new weights."""


@pytest.fixture
def fleets(nats_url: str, real_workers: RealWorkers, real_fleet: str, tiny_moe_float32: Path) -> Fleets:
    """Return both fleets. Tests start as many workers of the old fleet as they need."""
    return Fleets(nats_url, real_workers, real_fleet, tiny_moe_float32)


QUESTIONS = [greedy(20 + seed, 24, seed, request_id=f"r{seed}") for seed in range(8)]


async def answers(rb: rollbus.Client, requests: Sequence[GenerateRequest] = QUESTIONS) -> dict[str, Generation]:
    """Return the fleet's generations of these requests, by request id."""
    results = {generation.request_id: generation async for generation in rb.complete_many(requests)}
    for request in requests:
        check_generation(results[request.request_id or ""], request)
    return results


def check_cut(chunks: Sequence[Chunk], undisturbed: Generation) -> None:
    """Assert that the last token of version 1 is the last one that the first weights sampled: the cut is exact.

    Args:
        undisturbed: the generation of the request with the first weights alone.
    """
    versions = [chunk.weight_version for chunk in chunks for _ in range(chunk.num_tokens)]
    assert len(versions) == len(undisturbed.token_ids)
    assert set(versions) == {1, 2}
    assert all(a <= b for a, b in pairwise(versions))
    cut = versions.index(2)
    token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks if chunk.logprobs is not None])
    rows = np.concatenate([chunk.routed_experts.numpy() for chunk in chunks if chunk.routed_experts is not None])
    old_logprobs = undisturbed.logprobs
    np.testing.assert_array_equal(token_ids[:cut], undisturbed.token_ids[:cut])
    np.testing.assert_allclose(logprobs[:cut], old_logprobs[:cut], atol=TOLERANCE)
    assert abs(logprobs[cut] - old_logprobs[cut]) > TOLERANCE
    # The row of the last of these tokens is computed when the next token is sampled, so it comes from the second
    # weights.
    past = undisturbed.prompt_len + cut - 1
    old_rows = expert_sets(undisturbed.routed_experts)
    np.testing.assert_array_equal(expert_sets(rows)[:past], old_rows[:past])
    assert (expert_sets(rows)[past] != old_rows[past]).any()


@pytest.mark.proves("P19")
async def test_real_engines_get_new_weights_while_they_stream(fleets: Fleets) -> None:
    """Streams finish with tokens of version 1 and then of version 2. Later results equal those of a fresh engine."""
    old = await fleets.old.have(2)
    # The requests are long enough for the command to start, check the source and pause the engines during them.
    requests = [greedy(120 + seed, 1000, seed, request_id=f"r{seed}") for seed in (100, 101)]
    async with rollbus.connect(fleets.url, fleet=fleets.old.fleet) as rb:
        before = await answers(rb)
        undisturbed = await answers(rb, requests)
        async with asyncio.TaskGroup() as tasks:
            streams = [await start_stream(tasks, rb, request) for request in requests]
            update = ("update-weights", str(fleets.new), "--version", "2", "--mode", "keep", "--json")
            ended = await run_rollbus(fleets.url, fleets.old.fleet, *update)
        after = await answers(rb)
    async with rollbus.connect(fleets.url, fleet=fleets.fresh) as other:
        fresh = await answers(other)

    assert ended.stdout, ended.stderr
    told = json.loads(ended.stdout)
    assert (ended.code, ended.stderr, told["complete"]) == (0, "", True)
    assert {worker["worker"]: worker["weight_version"] for worker in told["workers"]} == dict.fromkeys(old, 2)
    for stream in streams:
        check_stream(stream.chunks, stream.request)
        check_cut(stream.chunks, undisturbed[stream.request.request_id])
    for name, generation in after.items():
        assert {*before[name].weight_versions.tolist()} == {1}
        assert {*generation.weight_versions.tolist()} == {2}
        assert_same(generation, fresh[name])
    assert any(before[name].token_ids.tolist() != after[name].token_ids.tolist() for name in after)


@pytest.mark.proves("P17")
async def test_long_prompts_during_an_update_report_the_versions_of_their_kv(
    fleets: Fleets, tiny_moes: tuple[Path, Path]
) -> None:
    """A request without a token at the update is computed completely with the new weights.

    A request with tokens reports from which position its KV cache belongs to which version.
    """
    await fleets.old.have(1)
    requests = [greedy(1200, 24, seed, request_id=f"long{seed}", cache_salt="during") for seed in range(40)]
    first = greedy(1200, 24, 1000, request_id="first")
    async with rollbus.connect(fleets.url, fleet=fleets.old.fleet) as rb:
        assert (await rb.fleet.update_weights(fleets.new, version=3)).is_complete
        async with asyncio.TaskGroup() as tasks:
            stream = Stream(first, tasks, rb)
            during = tasks.create_task(answers(rb, requests))
            # The other requests wait behind this one, or their prompts are partly computed.
            await stream.has_begun.wait()
            assert (await rb.fleet.update_weights(tiny_moes[1], version=4, mode="keep")).is_complete
        after = await answers(rb, [replace(request, cache_salt="after") for request in requests])

    results = during.result()
    whole = {name: result for name, result in results.items() if set(result.weight_versions.tolist()) == {4}}
    assert whole
    for name, result in whole.items():
        assert_same(result, after[name])
    for result in results.values():
        versions = result.weight_versions.tolist()
        cut = versions.index(4) if 4 in versions else len(versions)
        spans = [(0, versions[0])]
        spans += [(result.prompt_len + cut - 1, 4)] if 0 < cut < len(versions) else []
        assert result.kv_version_spans == tuple(spans)
        assert result.kv_mixed.tolist() == [0 < cut <= i for i in range(len(versions))]
