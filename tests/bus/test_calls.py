"""The caller's side of a call that the bus thread serves, and the count of unread bytes."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbus
from rollbus.bus.client import batches
from rollbus.bus.client.calls import Call, CallResult, Inbox
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RequestFailed
from rollbus.schemas.limits import MAX_SEED
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.support.fleet import StartServed, until_idle
from tests.support.requests import all_of, endless, greedy, short, sized


def chunk_of(index: int, num_tokens: int = 1) -> Chunk:
    """Return a chunk with this number of tokens."""
    data = np.arange(num_tokens, dtype="<i4").tobytes()
    return Chunk(request_id="r", attempt=0, child=0, chunk_index=index, weight_version=0, token_ids_data=data)


def inbox() -> tuple[Inbox, list[Callable[[], None]]]:
    """Return an inbox and the list of callbacks that it schedules in the caller's loop."""
    told: list[Callable[[], None]] = []
    return Inbox(told.append), told


def new_call(inbox: Inbox, *, streams: bool = True) -> Call:
    """Return an open call."""
    return Call(GenerateRequest(prompt_token_ids=[1], request_id="r"), inbox, streams)


def test_a_blocked_caller_has_at_most_one_waiting_callback() -> None:
    """For any number of chunks and calls, at most one callback waits in the caller's loop.

    After it has run, the next is scheduled.
    """
    box, told = inbox()
    calls = [new_call(box) for _ in range(10)]
    for index in range(100):
        for call in calls:
            call.deliver([chunk_of(index)])
    assert len(told) == 1
    told[0]()
    calls[0].deliver([chunk_of(100)])
    calls[1].deliver([chunk_of(100)])
    assert len(told) == 2


def test_a_late_notification_does_not_change_the_end_time_of_a_call() -> None:
    """The end time of a call is the time at which it ended, also if a blocked loop notifies the caller later.

    Chunks of a call that is not streamed do not wake the caller. Only the end of the call does.
    """
    box, told = inbox()
    call = new_call(box, streams=False)
    call.deliver([chunk_of(0)])
    assert told == []
    ended: list[float] = []
    call.when_ended(lambda call: ended.append(0.0 if call.result is None else call.result.ended_at))
    before = time.monotonic()
    call.finish(CallResult((), None))
    after = time.monotonic()
    while time.monotonic() <= after:
        pass
    told[0]()
    assert len(ended) == 1
    assert before <= ended[0] <= after


async def test_a_reader_on_another_thread_receives_every_chunk_once() -> None:
    """A reader on one thread receives every chunk of a writer on another thread once, in order, and then the end."""
    loop = asyncio.get_running_loop()

    def notify(callback: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(callback)

    box = Inbox(notify)
    call = new_call(box)

    def write() -> None:
        for index in range(20_000):
            call.deliver([chunk_of(index)])
        call.finish(CallResult((), None))

    writer = threading.Thread(target=write)
    writer.start()
    indices = []
    while (chunk := await call.next_chunk()) is not None:
        indices.append(chunk.chunk_index)
    writer.join()

    assert indices == list(range(20_000))
    assert box.unread.num_bytes == 0


async def test_a_failed_call_yields_its_chunks_before_its_error() -> None:
    """A failed call yields the received chunks, singly or up to a limit of bytes, before it raises its error."""
    box, _ = inbox()
    call = new_call(box)
    call.deliver(list(map(chunk_of, range(6))))
    call.finish(CallResult((), RequestFailed(code=ErrorCode.WORKER_LOST, message="gone")))
    # A limit of one byte is reached after the second chunk.
    found = [[await call.next_chunk()], await call.next_chunks(1), await call.next_chunks(1 << 20)]

    assert [[chunk and chunk.chunk_index for chunk in chunks] for chunks in found] == [[0], [1, 2], [3, 4, 5]]
    assert not box.unread.num_bytes
    with pytest.raises(RequestFailed, match="gone"):
        await call.next_chunk()


def test_results_count_as_unread_until_they_are_read_or_abandoned() -> None:
    """Bytes of results count as unread until the caller reads or abandons them, or the client drops them."""
    box, _ = inbox()
    read, left = new_call(box), new_call(box, streams=False)
    read.deliver([chunk_of(0, 1000)])
    one = box.unread.num_bytes
    left.deliver([chunk_of(0, 1000)])
    assert one >= 4000
    assert box.unread.num_bytes == 2 * one
    left.abandon()
    assert box.unread.num_bytes == one
    left.deliver([chunk_of(1, 1000)])
    assert box.unread.num_bytes == 2 * one
    left.count_dropped()
    assert box.unread.num_bytes == one
    read.abandon()
    assert box.unread.num_bytes == 0


def test_a_callback_that_is_added_after_the_end_runs_immediately() -> None:
    """A callback for the end is called once: when the call ends, or immediately if the call has already ended."""
    box, told = inbox()
    heard: list[Call] = []
    call = new_call(box)
    call.finish(CallResult((), None))
    call.when_ended(heard.append)
    assert heard == [call]
    told[0]()
    assert heard == [call]


async def test_a_callback_that_fails_keeps_no_other_caller_waiting() -> None:
    """If the callback of a call raises an error, the callers of others that ended with it are notified too."""
    box, ended = Inbox(asyncio.get_running_loop().call_soon), asyncio.Event()  # type: ignore[arg-type]
    calls = [new_call(box), new_call(box)]
    calls[0].when_ended(lambda _: list[None]().pop())
    calls[1].when_ended(lambda _: ended.set())
    for call in calls:
        call.finish(CallResult((), None))
    await ended.wait()


def test_an_invalid_request_raises_its_error_in_the_thread_of_the_caller() -> None:
    """An invalid request raises its error when the caller opens it, not on the bus thread."""
    box, _ = inbox()
    sampling = SamplingParams(n=2, seed=MAX_SEED - 1)
    assert len(Call(GenerateRequest(prompt_token_ids=[1], sampling=sampling), box, False).payloads) == 2
    with pytest.raises(InvalidRequest):
        Call(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(n=2, seed=MAX_SEED)), box, False)


# The kinds of iterables from which `complete_many` reads its requests: lists, iterators and async iterables.


REQUESTS = [short(f"r{index}") for index in range(20)]


async def later(*requests: Any) -> AsyncIterator[Any]:
    """Yield the requests, each after one turn of the loop."""
    for request in requests:
        await asyncio.sleep(0)
        yield request


def ids_of(results: list[rollbus.Generation]) -> list[str]:
    """Return the sorted request ids of these results."""
    return sorted(result.request_id for result in results)


async def test_every_request_of_each_kind_of_source_gets_a_result(one_worker: StartServed) -> None:
    """Every request of a list, an iterator and an async iterable gets a result."""
    sources: list[Any] = [REQUESTS, iter(REQUESTS), later(*REQUESTS)]
    async with one_worker() as (rb, *_):
        for source in sources:
            results = [result async for result in rb.complete_many(source, max_in_flight=3)]
            assert ids_of(results) == sorted(request.request_id for request in REQUESTS)
            assert all(result.error is None for result in results)


async def test_an_async_source_may_wait_for_results(one_worker: StartServed) -> None:
    """A source may wait for the result of one request before it yields the next request."""
    returned = asyncio.Event()

    async def one_by_one() -> AsyncIterator[rollbus.GenerateRequest]:
        for index in range(3):
            returned.clear()
            yield short(f"r{index}")
            await returned.wait()

    async with one_worker() as (rb, *_):
        results = []
        async for result in rb.complete_many(one_by_one()):
            results.append(result.request_id)
            returned.set()

    assert results == ["r0", "r1", "r2"]


async def test_complete_many_reads_no_more_requests_than_are_opened(one_worker: StartServed) -> None:
    """`complete_many` reads no more of an endless source than it opens."""
    drawn = []

    async def endless_source() -> AsyncIterator[rollbus.GenerateRequest]:
        for index in range(10**9):
            drawn.append(index)
            yield short(f"r{index}")

    async with one_worker() as (rb, *_):
        results = rb.complete_many(endless_source(), max_in_flight=4)
        async with contextlib.aclosing(results):
            taken = [await anext(results) for _ in range(5)]

    assert len(taken) == 5
    assert len(drawn) <= 4 + 5


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_of_a_source_ends_the_batch_and_is_raised(one_worker: StartServed, is_async: bool) -> None:
    """The error of a source ends the batch and is raised, and open requests are aborted."""

    def fails() -> Iterator[rollbus.GenerateRequest]:
        yield endless()
        raise KeyError("no more prompts")

    async def fails_later() -> AsyncIterator[rollbus.GenerateRequest]:
        for request in fails():
            yield request

    async with one_worker() as (rb, _, engine):
        with pytest.raises(KeyError, match="no more prompts"):
            await all_of(rb.complete_many(fails_later() if is_async else fails()))
        await until_idle(engine, rb)


async def test_leaving_the_loop_cancels_the_source(one_worker: StartServed) -> None:
    """If the caller leaves the loop while an async source waits, the source is cancelled and finishes its cleanup."""
    seen = []

    async def waits() -> AsyncIterator[rollbus.GenerateRequest]:
        yield short("first")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cleaned up")

    async with one_worker() as (rb, *_):
        async with contextlib.aclosing(rb.complete_many(waits())) as results:
            assert (await anext(results)).request_id == "first"
        assert seen == ["cleaned up"]
        assert (await rb.complete(short("after"))).finish_reason == "length"


async def test_values_that_are_no_requests_are_refused(one_worker: StartServed) -> None:
    """Values that are no requests are rejected with the name of the argument. None in a list raises an error too."""
    wrong: list[tuple[Any, str]] = [
        (None, "requests is None; allowed: an iterable of requests"),
        (greedy(1, 1), "requests is "),
        ([greedy(1, 1), None], "requests has None; allowed: requests, or the token ids"),
    ]
    async with one_worker() as (rb, *_):
        for requests, message in wrong:
            with pytest.raises(InvalidRequest, match=message):
                await all_of(rb.complete_many(requests))


# Statistics of a batch's slowest requests: exact for usual sizes, and in bounded memory for any size.


PAUSES_S = st.lists(st.integers(0, 1000), min_size=1, max_size=300)
PERCENTS = st.floats(0, 100, exclude_min=True)
"""Percentages above 0. A share of a batch is at least one request, however small the percentage is."""


def times_of(ends: list[float]) -> rollbus.BatchTimes:
    """Return the times of a batch that starts at 1,000 s and whose requests end after these seconds."""
    times = rollbus.BatchTimes()
    times.start(1000.0)
    for end in ends:
        times.add(1000.0 + end)
    return times


def ends_of(pauses: list[int]) -> list[float]:
    """Return the end times of requests that run one after the other."""
    return [float(sum(pauses[: index + 1])) for index in range(len(pauses))]


def number_of(ends: list[float], percent: float) -> int:
    """Return the rank of the request that completes a share of the batch, counted from 1."""
    return max(math.ceil(len(ends) * percent / 100), 1)


def test_a_batch_without_a_complete_request_has_no_times() -> None:
    """An empty batch and a batch that has just restarted have no times."""
    assert rollbus.BatchTimes().percentiles() == {}
    times = times_of([1.0, 2.0])
    times.start(2000.0)
    assert times.percentiles() == {}
    assert times.seconds_to(50) is None


@pytest.mark.parametrize("percent", [0, -1, 100.1, math.nan])
def test_a_share_out_of_range_is_refused(percent: float) -> None:
    """`seconds_to` rejects a percentage that is out of range, and the error states the allowed range."""
    with pytest.raises(ValueError, match="allowed: above 0, up to 100"):
        times_of([1.0]).seconds_to(percent)


@given(PAUSES_S, PERCENTS)
def test_times_of_any_batch_equal_the_sorted_ends_of_its_requests(pauses: list[int], percent: float) -> None:
    """The time of any share of any batch is the end of the request with that rank."""
    ends = ends_of(pauses)
    assert times_of(ends).seconds_to(percent) == ends[number_of(ends, percent) - 1]


@given(PAUSES_S, PERCENTS)
def test_an_endless_batch_uses_bounded_memory(pauses: list[int], percent: float) -> None:
    """In a batch beyond the memory limit, the time of a share is that of a slightly later request.

    The last time is exact.
    """
    ends = ends_of(pauses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MAX_TIMES", 16)
        times = times_of(ends)
        assert len(times._times_s) < 16
    number = number_of(ends, percent)
    # After thinning, the batch still stores at least 8 times, so the rank is off by at most an eighth.
    behind = math.ceil(len(ends) / 8)
    seconds = times.seconds_to(percent)
    assert ends[number - 1] <= seconds <= ends[min(number + behind, len(ends)) - 1]
    assert times.seconds_to(100) == ends[-1]


async def test_complete_many_measures_the_times_of_its_batch(one_worker: StartServed) -> None:
    """`complete_many` counts both served and rejected requests. A second batch resets the times."""
    twice = sized(request_id="twice")
    requests = [sized(request_id=f"r{number}") for number in range(8)]
    times = rollbus.BatchTimes()
    async with one_worker() as (rb, *_):
        results = await all_of(rb.complete_many([twice, twice, *requests], times=times))
        assert [result.error is None for result in results].count(False) == 1
        assert times.num_complete == 10
        percentiles = times.percentiles()
        assert 0 < percentiles[50] <= percentiles[90] <= percentiles[99] <= percentiles[100]
        await all_of(rb.complete_many(requests[:3], times=times))
        assert times.num_complete == 3
