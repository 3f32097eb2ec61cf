"""Placed requests at real workers: groups stay together, and kills, freezes, updates and other clients lose nothing."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.protocol.queue.load import PIECE_TOKENS
from rollbus.bus.protocol.queue.placement import PlacementReason
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.control.support import write_checkpoint
from tests.support.fleet import synthetic_worker
from tests.support.invariants import observing
from tests.support.processes import LASTING, worker_process
from tests.support.requests import Load, endless
from tests.support.waits import until_true

ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE, "prefix_cache": True}
CONFIG = SyntheticConfig.from_args(ENGINE_ARGS)
LEASE = ("--lease-s", "2")
SAMPLES = 4
PROMPT_LEN = 3 * PIECE_TOKENS


def prompt(seed: int) -> list[int]:
    """Return a prompt of three blocks."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]


def group(seed: int, n: int = SAMPLES) -> GenerateRequest:
    """Return a request for samples of one prompt, with a seed that determines all tokens."""
    sampling = SamplingParams(n=n, max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
    return GenerateRequest(request_id=f"g{seed}", prompt_token_ids=prompt(seed), sampling=sampling, timeout_s=600.0)


def samples(generation: Generation) -> tuple[Generation, ...]:
    """Return all samples of a request."""
    return generation, *generation.siblings


@contextlib.asynccontextmanager
async def workers(nats_url: str, fleet: str, names: Sequence[str], config: SyntheticConfig) -> AsyncIterator[None]:
    """Run workers with these names in this process."""
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(synthetic_worker(nats_url, fleet, config=config, worker_id=name))
        yield


@pytest.mark.usefixtures("unhurried")
async def test_samples_of_one_request_compute_their_prompt_once(nats_url: str, fleet: str) -> None:
    """With enough slots, all samples of a group run at one worker, and all but one find the prompt in the cache."""
    load = await Load.of([group(seed) for seed in range(12)], CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        workers(nats_url, fleet, ("a", "b", "c"), CONFIG),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(3)
        results = await load.run(rb, max_in_flight=3)
        stats = rb.stats()
        await observer.check_at_rest()

    assert {len({each.worker_ids for each in samples(result)}) for result in results} == {1}
    assert {len([each for each in samples(result) if not each.cached_tokens]) for result in results} == {1}
    assert {result.worker_ids for result in results} == {("a",), ("b",), ("c",)}
    assert stats.placed[PlacementReason.PLACED_GROUP] == 12 * SAMPLES
    # The cache reports the number of cached prompt tokens exactly.
    assert 0 < stats.expected_cached_tokens <= 12 * (SAMPLES - 1) * PROMPT_LEN
    assert stats.placed_cached_tokens >= 12 * (SAMPLES - 1) * (PROMPT_LEN - PIECE_TOKENS)


async def test_groups_placed_at_a_killed_worker_complete_once(nats_url: str, fleet: str) -> None:
    """If a worker is killed with placed groups, each sample completes once and equals the undisturbed one.

    Some groups are in its engine, some are on their way to it, and some follow a leader there.
    """
    load = await Load.of([group(seed) for seed in range(30)], CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=ENGINE_ARGS) as doomed,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS),
    ):
        await rb.fleet.wait_for_workers(2)

        async def kill() -> None:
            doomed.kill()

        results = await load.run(rb, strikes={5: kill}, max_in_flight=12)
        resumed = [each for result in results for each in samples(result) if each.attempts > 1]
        assert resumed
        assert {each.worker_ids[-1] for each in resumed} == {"b"}
        await observer.check_at_rest()


async def test_a_turn_that_waits_for_its_session_at_a_killed_worker_completes_once(nats_url: str, fleet: str) -> None:
    """A turn of a session waits at the full worker that has its prompt. If that worker is killed, it runs elsewhere."""
    args = {**ENGINE_ARGS, "max_num_seqs": 1, "max_model_len": 10_000_000}
    turns = [
        GenerateRequest(
            request_id=name, prompt_token_ids=2 * prompt(1), sampling=short, session_id="s", timeout_s=600.0
        )
        for name, short in (("first", SamplingParams(max_tokens=2)), ("second", SamplingParams(max_tokens=20, seed=1)))
    ]
    load = await Load.of(turns[1:], SyntheticConfig.from_args(args))
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=args) as a,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "b", engine_args=args) as b,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(2)
        [worker] = (await rb.complete(turns[0])).worker_ids
        others = [tasks.create_task(rb.complete(endless(f"other-{number}"))) for number in range(2)]
        while any(each.free_slots for each in (await rb.fleet.state()).workers):
            pass
        before = rb.stats().placed[PlacementReason.PLACED_SESSION]
        turn = tasks.create_task(load.run(rb))
        await until_true(lambda: rb.stats().placed[PlacementReason.PLACED_SESSION] > before)
        {"a": a, "b": b}[worker].kill()
        await until_true(lambda: len(rb.fleet.workers) == 1)
        for other in others:
            other.cancel()
        [result] = await turn
        await observer.check_at_rest()

    assert {result.worker_ids[-1]} == {"a", "b"} - {worker}


async def test_requests_placed_at_a_frozen_worker_run_elsewhere(nats_url: str, fleet: str) -> None:
    """If the worker with the prefix is frozen, placed requests run elsewhere, and no more are placed there."""
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "a", engine_args=ENGINE_ARGS) as a,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS) as b,
    ):
        await rb.fleet.wait_for_workers(2)
        warm = await rb.complete(group(0, n=2))
        [frozen] = warm.worker_ids
        process = {"a": a, "b": b}[frozen]
        process.send_signal(signal.SIGSTOP)
        before = rb.stats()
        results = [await rb.complete(group(0, n=2)) for _ in range(3)]
        stats = rb.stats()
        process.send_signal(signal.SIGCONT)
        await observer.check_at_rest()

    assert all(each.attempts <= 2 for result in results for each in samples(result))
    assert stats.placements_refused - before.placements_refused <= 2
    assert {result.worker_ids[-1] for result in results} == {"b" if frozen == "a" else "a"}


@pytest.mark.usefixtures("unhurried")
async def test_new_weights_invalidate_a_cached_prompt(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A prompt is placed at the worker that caches it.

    After an update no worker caches it, and it is computed again.
    """
    old, new = (write_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    fields = {"config": CONFIG, "model_path": str(old), "weight_roots": (str(tmp_path),)}
    one = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    async with (
        observing(nats_url, fleet) as observer,
        synthetic_worker(nats_url, fleet, worker_id="a", **fields),  # type: ignore[arg-type]
        synthetic_worker(nats_url, fleet, worker_id="b", **fields),  # type: ignore[arg-type]
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)

        async def ask() -> Generation:
            return await rb.complete(GenerateRequest(prompt_token_ids=prompt(1), sampling=one))

        first, second = await ask(), await ask()
        assert rb.stats().placed[PlacementReason.PLACED_PREFIX] == 1
        await rb.fleet.update_weights(new, version=1)
        # Both workers have published the new epoch of their caches.
        await rb.fleet.state()
        third, fourth = await ask(), await ask()
        assert rb.stats().placed[PlacementReason.PLACED_PREFIX] == 2
        await observer.check_at_rest()

    assert (first.worker_ids, third.worker_ids) == (second.worker_ids, fourth.worker_ids)
    assert [bool(each.cached_tokens) for each in (first, second, third, fourth)] == [False, True, False, True]
    assert [each.weight_versions[0] for each in (first, second, third, fourth)] == [0, 0, 1, 1]


async def test_surplus_requests_of_two_placing_clients_go_to_the_queue(nats_url: str, fleet: str) -> None:
    """Two clients do not know each other's placements. Workers reject surplus requests, and the queue accepts them."""
    small = SyntheticConfig.from_args({**ENGINE_ARGS, "max_num_seqs": 6})
    mine, theirs = ([group(seed) for seed in range(start, start + 20)] for start in (0, 100))
    loads = [await Load.of(requests, small) for requests in (mine, theirs)]
    async with (
        observing(nats_url, fleet) as observer,
        workers(nats_url, fleet, ("a", "b"), small),
        rollbus.connect(nats_url, fleet=fleet) as one,
        rollbus.connect(nats_url, fleet=fleet) as other,
    ):
        async with asyncio.TaskGroup() as tasks:
            for rb, load in zip((one, other), loads, strict=True):
                await rb.fleet.wait_for_workers(2)
                tasks.create_task(load.run(rb, max_in_flight=4))
        assert one.stats().direct
        assert other.stats().direct
        await observer.check_at_rest()
