"""On a fleet without a free slot, the prompt of each group is computed about once, also if workers fail meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.fleet import check_generation, synthetic_worker
from tests.support.patience import SOON_S
from tests.support.waits import until_true

CONFIG = SyntheticConfig(
    step_s=0.002, max_num_seqs=4, prefix_cache=True, prefix_cache_tokens=200_000, num_experts=0, max_model_len=8192
)
GROUP = 8
PROMPT_TOKENS = 1024


def group(number: int, *, max_tokens: int = 16) -> GenerateRequest:
    """Return a request for eight samples of a prompt that no other group has."""
    prompt = [2 + number % 100, *([3 + number // 100] * (PROMPT_TOKENS - 1))]
    sampling = SamplingParams(n=GROUP, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, request_id=f"g{number}")


@contextlib.asynccontextmanager
async def fleet_of(
    url: str, fleet: str, count: int
) -> AsyncIterator[tuple[rollbus.Client, list[tuple[Worker, SyntheticEngine]]]]:
    """Start this number of workers with four slots each, and a client that knows them."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(synthetic_worker(url, fleet, config=CONFIG, worker_id=f"w{i}"))
            for i in range(count)
        ]
        rb = await stack.enter_async_context(rollbus.connect(url, fleet=fleet, client="me"))
        await rb.fleet.wait_for_workers(count)
        async with asyncio.timeout(SOON_S):
            yield rb, workers


def samples(results: Sequence[Generation]) -> list[Generation]:
    """Return all samples of these calls."""
    return [each for result in results for each in (result, *result.siblings)]


def num_waiting(workers: Sequence[tuple[Worker, SyntheticEngine]]) -> int:
    """Return the number of followers that wait at the workers."""
    return sum(len(worker._intake.followers) for worker, _ in workers)


async def test_a_full_fleet_computes_each_prompt_about_once(nats_url: str, fleet: str) -> None:
    """Thirty concurrent groups for twelve slots compute each prompt about once.

    With the queue alone, two or three workers would compute each prompt.
    """
    async with fleet_of(nats_url, fleet, 3) as (rb, _), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(rb.complete(group(number))) for number in range(30)]
        results = [await call for call in calls]

    places = [{each.worker_ids for each in (result, *result.siblings)} for result in results]
    assert len(samples(results)) == 30 * GROUP
    assert sum(map(len, places)) <= 1.4 * len(places)


@pytest.mark.parametrize("event", ["pause", "drain", "stop", "kill", "fence", "weights"])
async def test_no_token_is_lost_if_a_worker_with_a_backlog_stops_or_pauses(
    nats_url: str, fleet: str, event: str
) -> None:
    """If a worker with waiting followers stops, dies, pauses or changes weights, no request loses a token."""
    with contextlib.ExitStack() as dying:
        if event == "kill":
            dying.enter_context(pytest.raises(ExceptionGroup, match="unhandled errors"))
        await have(event, nats_url, fleet)


async def have(event: str, url: str, fleet: str) -> None:
    """Let the event happen to a worker at which followers wait."""
    async with fleet_of(url, fleet, 2) as (rb, workers), asyncio.TaskGroup() as tasks:
        requests = [group(number, max_tokens=40) for number in range(10)]
        calls = [tasks.create_task(rb.complete(request)) for request in requests]
        await until_true(lambda: num_waiting(workers) > 0)
        worker, engine = next(each for each in workers if num_waiting([each]))
        match event:
            case "pause":
                await rb.fleet.pause()
                assert not num_waiting(workers)
                await rb.fleet.resume()
            case "drain":
                await rb.fleet.pause(mode="wait")
                assert not num_waiting(workers)
                await rb.fleet.resume()
            case "stop":
                worker.stop()
            case "kill":
                engine.kill()
            case "fence":
                worker._lifecycle.fence("by hand")
            case _:
                worker._in_flight.stop_intake()
                await worker._in_flight.pause_engine()
                await worker._in_flight.resume()
        for call, request in zip(calls, requests, strict=True):
            result = await call
            for each in (result, *result.siblings):
                assert len(each.token_ids) == 40
                check_generation(each, request, routing=False)


async def test_another_client_keeps_the_queue_order_during_a_flood_of_groups(nats_url: str, fleet: str) -> None:
    """Requests of another client are served in the order of the queue, while a flood of groups continues."""
    async with (
        fleet_of(nats_url, fleet, 2) as (flooder, workers),
        rollbus.connect(nats_url, fleet=fleet, client="bob") as bob,
        asyncio.TaskGroup() as tasks,
    ):
        await bob.fleet.wait_for_workers(2)

        async def flood(number: int) -> None:
            while True:
                await flooder.complete(group(number))
                number += 100

        floods = [tasks.create_task(flood(number)) for number in range(8)]
        await until_true(lambda: num_waiting(workers) > 0)
        for number in range(20):
            prompt = [9, *([number + 2] * 20)]
            await bob.complete(GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4)))
        assert not any(each.done() for each in floods)
        for each in floods:
            each.cancel()


async def test_a_cancelled_call_leaves_no_follower_behind(nats_url: str, fleet: str) -> None:
    """A cancelled call leaves no sample in the queue, at the client or in a backlog, and frees the slots."""
    async with fleet_of(nats_url, fleet, 1) as (rb, workers), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(rb.complete(group(number, max_tokens=2000))) for number in range(4)]
        await until_true(lambda: num_waiting(workers) > 0)
        for call in calls:
            call.cancel()
        await until_true(lambda: not num_waiting(workers) and workers[0][0].presence().in_flight == 0)
        assert len((await rb.complete(group(9))).siblings) == GROUP - 1
