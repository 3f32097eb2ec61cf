"""The kinds of iterables from which `complete_many` reads its requests: lists, iterators and async iterables."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import rollbus
from rollbus.schemas.errors import InvalidRequest
from tests.support.fleet import StartServed, until_idle
from tests.support.requests import endless, greedy, short
from tests.support.streams import all_of

REQUESTS = [short(f"r{index}") for index in range(20)]


async def later(*requests: Any) -> AsyncIterator[Any]:
    """Yield the requests, each after one turn of the loop."""
    for request in requests:
        await asyncio.sleep(0)
        yield request


def ids_of(results: list[rollbus.Generation]) -> list[str]:
    """Return the sorted request ids of these results."""
    return sorted(result.request_id for result in results)


@pytest.mark.parametrize("source", ["list", "iterator", "async"])
async def test_every_request_of_each_kind_of_source_gets_a_result(one_worker: StartServed, source: str) -> None:
    """Every request of a list, an iterator and an async iterable gets a result."""
    async with one_worker() as (rb, *_):
        sources: dict[str, Any] = {"list": REQUESTS, "iterator": iter(REQUESTS), "async": later(*REQUESTS)}
        results = [result async for result in rb.complete_many(sources[source], max_in_flight=3)]

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


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (None, "requests is None; allowed: an iterable of requests"),
        (greedy(1, 1), "requests is "),
        ([greedy(1, 1), None], "requests has None; allowed: requests, or the token ids"),
    ],
)
async def test_values_that_are_no_requests_are_refused(one_worker: StartServed, requests: Any, message: str) -> None:
    """Values that are no requests are rejected with the name of the argument. None in a list raises an error too."""
    async with one_worker() as (rb, *_):
        with pytest.raises(InvalidRequest) as caught:
            await all_of(rb.complete_many(requests))
    assert message in str(caught.value)
