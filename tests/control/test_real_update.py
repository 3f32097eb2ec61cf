"""New weights on real engines, while they work: the command line, two vLLM workers, a third that comes later."""

import asyncio
import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

import bus
from bus import Chunk, GenerateRequest, Generation, SamplingParams
from frontend.cli.exits import ExitCode
from schemas.presence import WorkerState
from tests.cli.support import run_rollbus
from tests.control.support import is_in, until, worker_of
from tests.support.fleet import check_generation
from tests.support.invariants import check_stream
from tests.support.results import TOLERANCE, assert_same, expert_sets
from workers.engines.vllm.tiny_moe import make_tiny_moe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENGINE_ARGS = '{"dtype": "float32", "max_model_len": 8192, "max_num_seqs": 16}'
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


class Fleets(NamedTuple):
    """What runs for this test."""

    url: str
    old: str
    """Two workers with the first weights."""
    victim: subprocess.Popen[bytes]
    """The second of them, `w1`."""
    fresh: str
    """One worker that was started with the second weights."""
    checkpoints: tuple[Path, Path]


@contextlib.contextmanager
def vllm_worker(url: str, fleet: str, name: str, model: Path, version: int) -> Iterator[subprocess.Popen[bytes]]:
    """A vLLM worker process; it must stop in order, unless the test has killed it."""
    where = ("--nats", url, "--fleet", fleet, "--worker-id", name, "--served-model-name", "m")
    weights = ("--model", str(model), "--weight-version", str(version), "--weight-root", str(model.parent))
    process = subprocess.Popen([sys.executable, "-m", "workers", *where, *weights, "--engine-args", ENGINE_ARGS])
    try:
        yield process
        if process.poll() is None:
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
        vllm_worker(nats_url, old, "w1", one, 1) as victim,
        vllm_worker(nats_url, fresh, "fresh", two, 2),
    ):
        asyncio.run(wait_for_workers(nats_url, old, 2))
        asyncio.run(wait_for_workers(nats_url, fresh, 1))
        yield Fleets(nats_url, old, victim, fresh, (one, two))


def greedy(seed: int, max_tokens: int) -> GenerateRequest:
    """A greedy request that does not end early."""
    prompt = np.random.default_rng(seed).integers(10, 500, 20 + seed)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, request_id=f"r{seed}")


QUESTIONS = [greedy(seed, 24) for seed in range(8)]


async def answers(rb: bus.Client, requests: Sequence[GenerateRequest] = QUESTIONS) -> dict[str, Generation]:
    """What the fleet makes of these requests, by their ids."""
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


def check_cut(chunks: Sequence[Chunk], undisturbed: Generation) -> None:
    """The last token of version 1 is the last one that the first weights sampled: the cut is exact.

    Args:
        undisturbed: what the first weights alone make of the request.
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
    assert old_logprobs is not None
    np.testing.assert_array_equal(token_ids[:cut], undisturbed.token_ids[:cut])
    np.testing.assert_allclose(logprobs[:cut], old_logprobs[:cut], atol=TOLERANCE)
    assert abs(logprobs[cut] - old_logprobs[cut]) > TOLERANCE
    # The row of the last of these tokens is made when the next one is sampled, hence by the second weights.
    past = undisturbed.prompt_len + cut - 1
    old_rows = expert_sets(undisturbed.routed_experts)
    np.testing.assert_array_equal(expert_sets(rows)[:past], old_rows[:past])
    assert (expert_sets(rows)[past] != old_rows[past]).any()


async def test_real_engines_get_new_weights_while_they_stream(fleets: Fleets) -> None:
    """Streams finish, with tokens of version 1, then of 2; after that all answers equal a fresh engine's on them."""
    requests = [greedy(100 + i, 2000) for i in range(4)]
    streams: list[list[Chunk]] = [[] for _ in requests]
    async with bus.connect(fleets.url, fleet=fleets.old) as rb:
        before = await answers(rb)
        undisturbed = await answers(rb, requests)
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
        check_cut(chunks, undisturbed[request.request_id or ""])
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


async def test_a_real_worker_killed_during_the_update_is_named(fleets: Fleets) -> None:
    """Exit code 3: the ledger says who is missing; the other serves the new version, as it says, and as it should."""
    update = ("update-weights", str(fleets.checkpoints[1]), "--version", "3", "--json")
    async with bus.connect(fleets.url, fleet=fleets.old) as rb:
        assert (await run_rollbus(fleets.url, fleets.old, "resume")).code == 0
        await until(rb, lambda state: all(worker.state is WorkerState.SERVING for worker in state.workers))
        [core] = [
            child for child in psutil.Process(fleets.victim.pid).children(recursive=True) if "Engine" in child.name()
        ]
        core.suspend()  # in the midst of it, then
        async with asyncio.TaskGroup() as tasks:
            updating = tasks.create_task(run_rollbus(fleets.url, fleets.old, *update))
            await until(rb, is_in("w1", WorkerState.UPDATING))
            fleets.victim.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                core.resume()
            ended = await updating
        state = await rb.fleet.state()
        after = await answers(rb)
    async with bus.connect(fleets.url, fleet=fleets.fresh) as other:
        fresh = await answers(other)

    told = {worker["worker"]: worker for worker in json.loads(ended.stdout)["workers"]}
    assert (ended.code, told["w0"]["result"], told["w1"]["result"]) == (ExitCode.PARTIAL, "applied", "missing")
    assert "w1 is missing" in ended.stderr
    survivor = worker_of(state, "w0")
    assert (survivor.state, survivor.weight_version, survivor.target_version) == (WorkerState.SERVING, 3, 3)
    for name, generation in after.items():
        assert generation.worker_ids == ("w0",)
        assert {*generation.weight_versions.tolist()} == {3}
        assert_same(generation, fresh[name])
