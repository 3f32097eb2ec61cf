"""Requests that kill engines are detected and fail, and other requests complete."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import EngineDead, ErrorCode, NoWorkers, RequestError, RequestFailed
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.hand_worker import chunk, failure, hand_worker, request
from tests.support.invariants import check_stream, observing
from tests.support.processes import worker_process
from tests.support.requests import error_of, greedy

BAD = 299
"""A prompt that begins with this token kills the engine that computes it."""
CONFIG = SyntheticConfig(step_s=0.002, max_num_seqs=16, vocab_size=300, faults=SyntheticFaults(dies_of=BAD))


@contextlib.asynccontextmanager
async def restarting_worker(nats_url: str, fleet: str, worker_id: str) -> AsyncIterator[list[EngineDead]]:
    """Run a worker that restarts each time its engine dies, and yield the deaths so far."""
    deaths: list[EngineDead] = []
    worker: Worker | None = None

    async def run() -> None:
        nonlocal worker
        while True:
            config = WorkerConfig(nats_url=nats_url, fleet=fleet, worker_id=worker_id, model="synthetic")
            worker = Worker(config, SyntheticEngine(CONFIG))
            try:
                await worker.run()
            except EngineDead as exc:
                deaths.append(exc)
            else:
                return

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(), name="undying worker")
        try:
            yield deaths
        finally:
            if worker is not None:
                worker.stop()
            await running


async def results_of(rb: rollbus.Client, requests: list[GenerateRequest]) -> dict[str, Generation]:
    """Return all results by request id."""
    return {generation.request_id: generation async for generation in rb.complete_many(requests)}


@pytest.mark.proves("P3")
@pytest.mark.parametrize("workers", [("a",), ("a", "b", "c")])
async def test_only_requests_that_kill_engines_fail_as_poison(
    nats_url: str, fleet: str, workers: tuple[str, ...]
) -> None:
    """Of 60 requests, only the two that kill engines fail as poison, after at most three engines each."""
    good = [greedy(index, 20, request_id=f"good-{index}") for index in range(58)]
    bad = [greedy(BAD, 20, request_id=f"bad-{index}") for index in range(2)]
    requests = [*good[:10], bad[0], *good[10:30], bad[1], *good[30:]]
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        contextlib.AsyncExitStack() as stack,
    ):
        deaths = [await stack.enter_async_context(restarting_worker(nats_url, fleet, name)) for name in workers]
        await rb.fleet.wait_for_workers(len(workers))
        results = await results_of(rb, requests)
        await observer.check_at_rest()

    failed = {request_id: result.error for request_id, result in results.items() if result.error is not None}
    assert {request_id: error.code for request_id, error in failed.items()} == {
        "bad-0": ErrorCode.POISON_REQUEST,
        "bad-1": ErrorCode.POISON_REQUEST,
    }
    assert all(len(results[request.request_id].token_ids) == 20 for request in good)
    assert sum(map(len, deaths)) <= 6


async def test_streams_of_dead_engines_resume_for_a_reader_of_many(nats_url: str, fleet: str) -> None:
    """`stream_many` returns each stream without a gap across dead engines, and ends the others as poison (I1 to I3)."""
    requests = [greedy(BAD if index == 20 else index, 60, request_id=f"r{index}") for index in range(40)]
    found: dict[str, list[Chunk]] = defaultdict(list)
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        restarting_worker(nats_url, fleet, "a") as first,
        restarting_worker(nats_url, fleet, "b") as second,
    ):
        await rb.fleet.wait_for_workers(2)
        async for chunks in rb.stream_many(requests):
            for one in chunks:
                found[one.request_id].append(one)
    assert first or second
    for each in requests:
        check_stream(found[each.request_id], each)
    assert {name for name, [*_, last] in found.items() if last.error is not None} == {"r20"}
    assert max(chunks[-1].attempt for chunks in found.values()) > 0


@pytest.mark.proves("P54")
async def test_suspects_are_published_one_at_a_time(nats_url: str, fleet: str) -> None:
    """Suspects are published one at a time, each after the first token of the previous one.

    Requests with a token follow immediately.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = [tasks.create_task(rb.complete(request(3, request_id=name))) for name in "abcd"]
        keys = {key.request_id: key for key in [await worker.next_key() for _ in "abcd"]}
        await worker.frame(0, chunk(keys["d"], 0, 7), admitted=tuple(keys.values()))
        dead = [failure(keys[name], int(name == "d"), ErrorCode.ENGINE_DEAD, total=int(name == "d")) for name in "abcd"]
        await worker.frame(1, *dead)
        await worker.acked(2)
        worker.incarnation = "life-2"
        await worker.announce()
        first, second = sorted([await worker.next_key(), await worker.next_key()], key=lambda key: key.request_id)
        assert (first.request_id, second.request_id) == ("a", "d")
        await worker.frame(0, chunk(second, 0, 8, 9, total=2), admitted=(second,))
        await worker.acked(1)
        assert worker.requests.empty()
        number, seen = 1, first
        for name in "abc":
            assert seen.request_id == name
            await worker.frame(number, chunk(seen, 0, 1), admitted=(seen,))
            # The next suspect is published before this one ends.
            following = await worker.next_key() if name != "c" else seen
            await worker.frame(number + 1, chunk(seen, 1, 2, 3, total=3))
            number, seen = number + 2, following

    assert [list(task.result().token_ids) for task in completing] == [[1, 2, 3]] * 3 + [[7, 8, 9]]


async def test_a_waiting_suspect_can_be_cancelled_aborted_or_timed_out(nats_url: str, fleet: str) -> None:
    """A suspect that waits can be cancelled and aborted, and it can exceed its deadline.

    The message states why it waited.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        tried = tasks.create_task(rb.complete(request(1, request_id="tried")))
        keys = [await worker.next_key()]
        left = tasks.create_task(rb.complete(request(1, request_id="left")))
        keys.append(await worker.next_key())
        late = tasks.create_task(error_of(rb.complete(request(1, request_id="late", timeout_s=1.5)), RequestError))
        keys.append(await worker.next_key())
        aborted = tasks.create_task(rb.complete(request(1, request_id="aborted")))
        keys.append(await worker.next_key())
        await worker.frame(0, *(failure(key, 0, ErrorCode.ENGINE_DEAD) for key in keys), admitted=tuple(keys))
        worker.incarnation = "life-2"
        await worker.announce()
        on_trial = await worker.next_key()
        left.cancel()
        assert await rb.abort(["aborted"]) == ["aborted"]
        error = await late
        assert worker.requests.empty()
        await worker.frame(0, chunk(on_trial, 0, 1, total=1), admitted=(on_trial,))
        generation = await tried
        # No other request arrives after it.
        another = tasks.create_task(rb.complete(request(1, request_id="another")))
        key = await worker.next_key()
        await worker.frame(1, chunk(key, 0, 1, total=1), admitted=(key,))
        await another

    assert key.request_id == "another"
    assert (generation.request_id, generation.attempts) == ("tried", 2)
    assert aborted.result().finish_reason == "abort"
    assert error.code is ErrorCode.TIMEOUT
    assert "one at a time" in error.message


async def test_suspects_without_a_worker_fail_after_the_grace_time(nats_url: str, fleet: str) -> None:
    """If the only worker is gone, waiting suspects fail after the grace time like other requests."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, client="me", worker_grace_s=0.5) as rb,
        asyncio.TaskGroup() as tasks,
    ):
        arguments = {"vocab_size": 300, "faults": {"dies_of": BAD}}
        async with worker_process(nats_url, fleet, engine_args=arguments) as process:
            await rb.fleet.wait_for_workers(timeout_s=60)
            bad = GenerateRequest(prompt_token_ids=[BAD], sampling=SamplingParams(max_tokens=5, n=4, seed=1))
            requests = [bad, greedy(BAD, 1), greedy(1, 10_000), greedy(2, 10_000)]
            failing_all = [tasks.create_task(error_of(rb.complete(wanted), RequestError)) for wanted in requests]
            await process.wait()
            errors = [await task for task in failing_all]

    for error in errors:
        assert isinstance(error, NoWorkers | RequestFailed)
        assert error.code in (ErrorCode.ENGINE_DEAD, ErrorCode.NO_WORKERS)
