"""`rb.abort`: in each state of a request, its response stream ends once with `abort`, and its engine stops."""

import asyncio
import contextlib

import numpy as np
import pytest

import rollbus
from rollbus import GenerateRequest, InvalidRequest, NoWorkers, SamplingParams
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, check_generation, until_idle
from tests.support.hand_worker import chunk, hand_worker, request
from tests.support.requests import all_of, sized
from tests.support.waits import SOON_S

ENDLESS = 1_000_000
SLOW = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)


@pytest.mark.proves("P37")
async def test_an_abort_ends_a_running_request_with_its_tokens_so_far(one_worker: StartServed) -> None:
    """After an abort, a stream yields the chunks so far and one terminal chunk with `abort`.

    `complete` returns the tokens so far.
    """
    async with one_worker(config=SLOW) as (rb, _, engine), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(sized(max_tokens=ENDLESS, request_id="whole")))
        async with contextlib.aclosing(rb.generate(sized(max_tokens=ENDLESS, request_id="stream"))) as stream:
            # Longer than the worker batches the tokens of the other request.
            chunks = [await anext(stream) for _ in range(200)]
            assert await rb.abort(["stream", "whole"]) == ["stream", "whole"]
            chunks += await all_of(stream)
        generation = await completing
        async with asyncio.timeout(SOON_S):
            await until_idle(engine, rb)
        expected = await rb.complete(sized(max_tokens=len(generation.token_ids)))

    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["abort"]
    assert chunks[-1].end.num_tokens == sum(chunk.num_tokens for chunk in chunks)
    assert generation.finish_reason == "abort"
    check_generation(generation, sized())
    np.testing.assert_array_equal(generation.token_ids, expected.token_ids)
    np.testing.assert_array_equal(generation.routed_experts, expected.routed_experts)


async def test_an_abort_ends_a_queued_request_immediately(one_worker: StartServed) -> None:
    """An abort ends a queued request immediately, although no slot is free.

    The worker that pulls the request later drops it.
    """
    config = SyntheticConfig(step_s=0.01, max_num_seqs=1, max_model_len=10_000_000)
    async with one_worker(config=config) as (rb, _, engine), asyncio.TaskGroup() as tasks:
        async with contextlib.aclosing(rb.generate(sized(max_tokens=ENDLESS))) as stream:
            await anext(stream)
            waiting = [tasks.create_task(rb.complete(sized(request_id=f"w{i}"))) for i in range(5)]
            while not await num_queued(rb):
                pass
            assert await rb.abort([f"w{i}" for i in range(5)]) == [f"w{i}" for i in range(5)]
            for task in waiting:
                generation = await task
                assert (generation.finish_reason, len(generation.token_ids)) == ("abort", 0)
        async with asyncio.timeout(SOON_S):
            while await num_queued(rb):
                pass
            await until_idle(engine, rb)


async def num_queued(rb: rollbus.Client) -> int:
    """Return the number of requests in the queue, both waiting and pulled but not acked."""
    return sum(depth.waiting + depth.in_hand for depth in (await rb.fleet.state()).queues)


async def test_abort_skips_unknown_and_ended_requests(one_worker: StartServed) -> None:
    """`abort` skips unknown ids and ids of ended requests. An id that is given twice counts once."""
    async with one_worker(config=SLOW) as (rb, *_):
        await rb.complete(sized(request_id="done"))
        async with contextlib.aclosing(rb.generate(sized(max_tokens=ENDLESS, request_id="open"))) as stream:
            await anext(stream)
            assert await rb.abort(["unknown", "open", "done", "open"]) == ["open"]
            assert await rb.abort(["open"]) == []
            assert (await all_of(stream))[-1].finish_reason == "abort"


async def test_abort_rejects_an_empty_list_and_a_string(nats_url: str, fleet: str) -> None:
    """`abort` rejects an empty list and a string. A string would otherwise count as a list of its characters."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        with pytest.raises(InvalidRequest, match="request_ids is empty"):
            await rb.abort([])
        with pytest.raises(InvalidRequest, match="request_ids is a string"):
            await rb.abort("abc")
        with pytest.raises(InvalidRequest, match="request_ids is empty"):
            await rb.abort(iter(()))


async def test_a_request_that_still_searches_for_workers_can_be_aborted(nats_url: str, fleet: str) -> None:
    """A request can be aborted while its client still searches for workers that serve the model."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(request_id="early")))
        await asyncio.sleep(0)
        assert await rb.abort(["early"]) == ["early"]
        generation = await completing
        with pytest.raises(NoWorkers):
            await rb.complete(request())

    assert (generation.finish_reason, len(generation.token_ids)) == ("abort", 0)


async def test_an_abort_ends_all_child_requests_of_a_request(nats_url: str, fleet: str) -> None:
    """An abort ends each of n=3 child requests once. A child request that has already finished keeps its result."""
    sampling = SamplingParams(max_tokens=5, n=3, temperature=0, logprobs=None)
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        call = GenerateRequest(prompt_token_ids=[1], sampling=sampling, request_id="three")
        completing = tasks.create_task(rb.complete(call))
        keys = sorted([await worker.next_key() for _ in range(3)])
        await worker.frame(0, chunk(keys[0], 0, 7, 8, total=2), chunk(keys[1], 0, 9), admitted=tuple(keys))
        await worker.acked(1)
        assert await rb.abort(["three"]) == ["three"]
        first = await completing
        aborted = await worker.aborted(2)

    assert [sample.finish_reason for sample in (first, *first.siblings)] == ["length", "abort", "abort"]
    assert [list(sample.token_ids) for sample in (first, *first.siblings)] == [[7, 8], [9], []]
    assert sorted(aborted) == keys[1:]


async def test_a_waiting_request_of_a_lost_worker_can_be_aborted(nats_url: str, fleet: str) -> None:
    """If a worker is lost, an abort ends its waiting request with the tokens that the client received."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(request_id="lost")))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.acked(1)
        await worker.announce(WorkerState.STOPPED)
        while not rb.stats().attempts_lost:
            await rb.fleet.state()
        assert await rb.abort(["lost"]) == ["lost"]
        generation = await completing

    assert (generation.finish_reason, list(generation.token_ids)) == ("abort", [7])
