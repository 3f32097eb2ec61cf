"""New weights on real engines, while they work: the command line, two vLLM workers, a third that comes later."""

import asyncio
import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import bus
from bus import Chunk, GenerateRequest, Generation, SamplingParams
from schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import until, worker_of
from tests.support.fleet import check_generation
from tests.support.invariants import check_stream
from tests.support.results import assert_same
from workers.engines.vllm.tiny_moe import make_tiny_moe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENGINE_ARGS = '{"dtype": "float32", "max_model_len": 8192, "max_num_seqs": 16}'
START_TIMEOUT_S = 110.0
STOP_TIMEOUT_S = 60.0


class Fleets(NamedTuple):
    """What runs for this test."""

    url: str
    old: str
    """Two workers with the first weights."""
    fresh: str
    """One worker that was started with the second weights."""
    checkpoints: tuple[Path, Path]


@contextlib.contextmanager
def vllm_worker(url: str, fleet: str, name: str, model: Path, version: int) -> Iterator[subprocess.Popen[bytes]]:
    """A vLLM worker process; it must stop in order."""
    where = ("--nats", url, "--fleet", fleet, "--worker-id", name, "--served-model-name", "m")
    weights = ("--model", str(model), "--weight-version", str(version), "--weight-root", str(model.parent))
    process = subprocess.Popen([sys.executable, "-m", "workers", *where, *weights, "--engine-args", ENGINE_ARGS])
    try:
        yield process
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


async def wait_for_workers(url: str, fleet: str, count: int) -> None:
    """Wait until so many workers of `fleet` serve."""
    async with bus.connect(url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers(count, timeout_s=START_TIMEOUT_S)


@pytest.fixture(scope="module")
def fleets(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """Three engines, started at the same time."""
    root = tmp_path_factory.mktemp("checkpoints")
    one, two = (make_tiny_moe(root / str(seed), dtype="float32", seed=seed) for seed in (0, 1))
    old, fresh = f"old-{uuid.uuid4().hex[:8]}", f"fresh-{uuid.uuid4().hex[:8]}"
    with (
        vllm_worker(nats_url, old, "w0", one, 1),
        vllm_worker(nats_url, old, "w1", one, 1),
        vllm_worker(nats_url, fresh, "fresh", two, 2),
    ):
        asyncio.run(wait_for_workers(nats_url, old, 2))
        asyncio.run(wait_for_workers(nats_url, fresh, 1))
        yield Fleets(nats_url, old, fresh, (one, two))


def greedy(seed: int, max_tokens: int) -> GenerateRequest:
    """A greedy request that does not end early."""
    prompt = np.random.default_rng(seed).integers(10, 500, 20 + seed)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, request_id=f"r{seed}")


async def answers(rb: bus.Client) -> dict[str, Generation]:
    """What the fleet makes of eight prompts, by request."""
    requests = [greedy(seed, 24) for seed in range(8)]
    results = {generation.request_id: generation async for generation in rb.complete_many(requests)}
    for request in requests:
        check_generation(results[request.request_id or ""], request)
    return results


async def read(rb: bus.Client, request: GenerateRequest, chunks: list[Chunk], begun: asyncio.Event) -> None:
    """Read a stream; `begun` is set when it has tokens."""
    async for chunk in rb.generate(request):
        chunks.append(chunk)
        if chunk.num_tokens:
            begun.set()


async def test_real_engines_get_new_weights_while_they_stream(fleets: Fleets) -> None:
    """Streams finish, with tokens of version 1, then of 2; after that all answers equal a fresh engine's on them."""
    requests = [greedy(100 + i, 3000) for i in range(4)]
    streams: list[list[Chunk]] = [[] for _ in requests]
    async with bus.connect(fleets.url, fleet=fleets.old) as rb:
        before = await answers(rb)
        async with asyncio.TaskGroup() as tasks:
            for request, chunks in zip(requests, streams, strict=True):
                begun = asyncio.Event()
                tasks.create_task(read(rb, request, chunks, begun))
                await begun.wait()
            update = ("update-weights", str(fleets.checkpoints[1]), "--version", "2", "--mode", "keep", "--json")
            ended = await run_rollbus(fleets.url, fleets.old, *update)
        after = await answers(rb)
    async with bus.connect(fleets.url, fleet=fleets.fresh) as other:
        fresh = await answers(other)

    told = json.loads(ended.stdout)
    assert (ended.code, ended.stderr, told["complete"]) == (0, "", True)
    assert {worker["worker"]: worker["weight_version"] for worker in told["workers"]} == {"w0": 2, "w1": 2}
    for request, chunks in zip(requests, streams, strict=True):
        check_stream(chunks, request)
        versions = [chunk.weight_version for chunk in chunks for _ in range(chunk.num_tokens)]
        assert len(versions) == 3000
        assert set(versions) == {1, 2}
        assert all(a <= b for a, b in pairwise(versions))
    for name, generation in after.items():
        assert {*before[name].weight_versions.tolist()} == {1}
        assert {*generation.weight_versions.tolist()} == {2}
        assert_same(generation, fresh[name])
    assert any(before[name].token_ids.tolist() != after[name].token_ids.tolist() for name in after)


async def test_a_worker_that_starts_later_has_the_new_weights(fleets: Fleets) -> None:
    """Started with the old checkpoint, it loads the desired one first, and answers as a fresh engine on that."""
    with vllm_worker(fleets.url, fleets.old, "w2", fleets.checkpoints[0], 1):
        await wait_for_workers(fleets.url, fleets.old, 3)
        assert (await run_rollbus(fleets.url, fleets.old, "drain", "w0", "w1")).code == 0
        async with bus.connect(fleets.url, fleet=fleets.old) as rb:
            state = await until(rb, lambda state: len(state.workers) == 3)
            late = await answers(rb)
    async with bus.connect(fleets.url, fleet=fleets.fresh) as other:
        fresh = await answers(other)

    worker = worker_of(state, "w2")
    assert (worker.state, worker.weight_version, worker.target_version) == (WorkerState.SERVING, 2, 2)
    for name, generation in late.items():
        assert generation.worker_ids == ("w2",)
        assert {*generation.weight_versions.tolist()} == {2}
        assert_same(generation, fresh[name])
