"""The limits of a client that sends many requests or reads slowly: requests in flight, unread bytes and credit."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

import rollbus
from rollbus import GenerateRequest, InvalidRequest, SamplingParams
from rollbus.bus.client.thread import LoopThread
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, check_generation
from tests.support.hand_worker import chunk, hand_worker, request, worker_by_hand
from tests.support.requests import sized

pytestmark = pytest.mark.slow


async def test_complete_many_reads_at_most_max_in_flight_requests_ahead(
    one_worker: StartServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`complete_many` reads at most `max_in_flight` requests ahead, and no request waits for the bus thread."""
    round_trips: list[object] = []
    run = LoopThread.run

    def counting(self: LoopThread[object], coroutine: object) -> object:
        round_trips.append(coroutine)
        return run(self, coroutine)  # type: ignore[arg-type]

    taken = 0

    def requests(count: int) -> Iterator[GenerateRequest]:
        nonlocal taken
        for index in range(count):
            taken += 1
            yield sized(1, 1, request_id=f"r{index}", return_routed_experts=False)

    config = SyntheticConfig(max_num_seqs=256)
    async with one_worker(config=config) as (rb, *_):
        # The first request without a model resolves it, with one round trip.
        await rb.complete(sized(1, 1))
        monkeypatch.setattr(LoopThread, "run", counting)
        seen = 0
        async for generation in rb.complete_many(requests(2000), max_in_flight=512):
            seen += 1
            assert generation.error is None
            assert taken - seen <= 513
        assert round_trips == []
        assert rb.stats().unread_bytes == 0
        assert rb.stats().attempts_lost == 0
    assert seen == 2000


@pytest.mark.proves("P6")
async def test_unread_results_delay_only_new_requests(one_worker: StartServed) -> None:
    """Above `max_unread_bytes`, `complete_many` reads no further request until the caller reads results.

    All requests finish.
    """
    taken = 0

    def requests() -> Iterator[GenerateRequest]:
        nonlocal taken
        for index in range(60):
            taken += 1
            yield sized(2000, 4, request_id=f"r{index}")

    config = SyntheticConfig(num_layers=16, top_k=8, max_num_seqs=64)  # 256 kB of routed experts for each
    async with one_worker(config=config, options={"max_unread_bytes": 1024**2}) as (rb, *_):
        results = rb.complete_many(requests(), max_in_flight=8)
        generations = [await anext(results)]
        # Without a reader, requests in flight finish, and the client sends no further requests.
        while (await rb.fleet.state()).workers[0].in_flight or not rb.stats().unread_bytes:
            pass
        assert taken <= 9
        assert rb.stats().unread_bytes <= 9 * 400_000
        async for generation in results:
            generations.append(generation)
            assert rb.stats().unread_bytes <= 9 * 400_000
        assert rb.stats().unread_bytes == 0

    assert len(generations) == 60
    for generation in generations:
        check_generation(generation, sized(2000, 4))


async def test_unread_results_of_another_call_do_not_stop_a_reading_caller(one_worker: StartServed) -> None:
    """If an unread stream uses up the byte limit, `complete_many` still proceeds, one request at a time."""
    config = SyntheticConfig(num_layers=16, top_k=8)
    async with (
        one_worker(config=config, options={"max_unread_bytes": 1000}) as (rb, *_),
        contextlib.aclosing(rb.generate(sized(2000, 50))) as stream,
    ):
        await anext(stream)
        while rb.stats().unread_bytes < 1000:
            await rb.fleet.state()
        requests = [sized(request_id=f"r{i}") for i in range(5)]
        assert len([g async for g in rb.complete_many(requests)]) == 5
        assert rb.stats().unread_bytes >= 1000


@pytest.mark.proves("P6")
async def test_the_memory_of_an_unread_stream_is_bounded_by_its_request(one_worker: StartServed) -> None:
    """The client receives an unread stream to its end.

    The stream delays no other request, and its memory then stays constant.
    """
    async with one_worker() as (rb, worker, _), contextlib.aclosing(rb.generate(sized(3, 2000))) as stream:
        first = await anext(stream)
        other = await rb.complete(sized(max_tokens=2500))
        while worker.presence().in_flight or worker.presence().held_bytes:
            await rb.fleet.state()
        full = rb.stats().unread_bytes
        await rb.fleet.state()
        assert rb.stats().unread_bytes == full
        rest = [chunk async for chunk in stream]
        assert rb.stats().unread_bytes == 0

    assert len(other.token_ids) == 2500
    assert first.num_tokens + sum(chunk.num_tokens for chunk in rest) == 2000


async def test_chunks_of_abandoned_calls_do_not_count_as_unread(nats_url: str, fleet: str) -> None:
    """Buffered and late chunks of a call whose caller has left do not count as unread."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        for number in range(20):
            stream = rb.generate(request(1000))
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(anext(stream))
                key = await worker.next_key()
                await worker.frame(2 * number, chunk(key, 0, 7), chunk(key, 1, 8), admitted=(key,))
                await first
            await stream.aclose()
            await worker.frame(2 * number + 1, chunk(key, 2, 9))
        await worker.acked(40)
        assert rb.stats().unread_bytes == 0
        assert rb.stats().late_chunks == 20


async def test_credit_of_all_workers_together_is_bounded(nats_url: str, fleet: str) -> None:
    """The credit that a client grants to all its workers together stays within its limit, for any number of workers."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker_by_hand(nats_url, fleet, f"w{i}", pulls=False)) for i in range(50)
        ]
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet, client="me"))
        await rb.fleet.wait_for_workers(50)
        for worker in workers:
            worker.client_incarnation = (await worker.presences.get()).incarnation
            await worker.frame(0)
        while rb.stats().frames < 50:
            await rb.fleet.state()
        for worker in workers:
            # Frames that arrived before the client knew all workers got more credit, and credit never decreases.
            worker.link = 1
            await worker.frame(0)
        credits = [(await worker.next_link()).credit for worker in workers]

    assert sum(credits) <= 32 * 1024**2
    assert 1024**2 > min(credits) > 1024**2 // 2


def test_a_limit_of_zero_unread_bytes_is_rejected() -> None:
    """The client rejects a limit of 0 unread bytes."""
    with pytest.raises(InvalidRequest, match="max_unread_bytes is 0"):
        rollbus.connect(max_unread_bytes=0)


async def test_n_samples_count_as_one_request_in_flight_for_complete_many(one_worker: StartServed) -> None:
    """A request for n samples counts as one request in flight for `complete_many`, and as n requests for the fleet."""
    sampling = SamplingParams(n=4, max_tokens=3, temperature=0, ignore_eos=True)
    requests = [GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling) for _ in range(10)]
    async with one_worker() as (rb, *_):
        async for generation in rb.complete_many(requests, max_in_flight=2):
            assert len(generation.siblings) == 3
        assert rb.stats().requests >= 40
