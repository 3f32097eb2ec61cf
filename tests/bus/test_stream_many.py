"""`stream_many`: the chunks of many requests for one reader."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbus
from rollbus.bus.client.calls import Call, CallResult, Inbox, SharedInbox
from rollbus.bus.client.client import runtime_of
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.bus.test_calls import chunk_of
from tests.support.fleet import StartServed, until_idle
from tests.support.invariants import check_stream
from tests.support.requests import all_of, endless, greedy, short
from tests.support.waits import until_true


@given(st.lists(st.tuples(st.sampled_from(["deliver", "read", "end"]), st.integers(0, 2))))
def test_each_chunk_is_read_once_and_counted_once(events: list[tuple[str, int]]) -> None:
    """The reader gets each chunk once, in order, after one wake-up; after it has left, no byte counts as unread."""
    told: list[Callable[[], None]] = []
    woken: list[None] = []
    box = Inbox(told.append)
    shared = SharedInbox(box, lambda: woken.append(None))
    calls = [Call(greedy(1, 9), shared, True) for _ in range(3)]
    sent: list[Chunk] = []
    read: list[Chunk] = []
    for event, index in events:
        if event == "read":
            while told:
                told.pop()()
            read += shared.take()
            assert read == sent
            for call in calls:
                if call.result is not None:
                    call.abandon()
                    call.count_dropped()
            assert box.unread_bytes == 0
        elif calls[index].result is None and event == "end":
            calls[index].finish(CallResult((), None))
        elif calls[index].result is None:
            sent.append(chunk_of(len(sent), index))
            calls[index].deliver(sent[-1:])
        assert len(told) <= 1
        assert bool(told) or len(woken) <= len(read)
    assert (box.unread_bytes > 0) == (len(read) < len(sent))
    shared.close()
    assert box.unread_bytes == 0


def by_request(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    """Return the chunks of each request."""
    found: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        found[chunk.request_id].append(chunk)
    return found


@pytest.mark.proves("P1", "P27")
async def test_every_sample_ends_with_one_terminal_chunk(one_worker: StartServed) -> None:
    """Each sample has gapless chunks and one terminal chunk, also if its request is rejected or fails at any point."""
    sampled, many = (SamplingParams(max_tokens=most, n=2, seed=1, ignore_eos=True) for most in (9, 10**6))
    good = [greedy(index, 20 + index, request_id=f"{index:0300}") for index in range(30)]
    good += [GenerateRequest(prompt_token_ids=[1], request_id=f"n{index}", sampling=sampled) for index in range(5)]
    late = GenerateRequest(prompt_token_ids=[1], request_id="late", sampling=many, timeout_s=0.5)
    num_drawn = num_ended = num_lists = 0

    def requests() -> Iterator[GenerateRequest]:
        nonlocal num_drawn
        for request in [late, short("late"), *good[:20], short("lora", lora="x"), *good[20:]]:
            num_drawn += 1
            yield request

    received: list[Chunk] = []
    async with one_worker() as (rb, *_):
        async for chunks in rb.stream_many(requests(), max_in_flight=8):
            num_lists += 1
            assert num_drawn - num_ended <= 8
            num_ended += sum(chunk.end is not None and chunk.child == 0 for chunk in chunks)
            received += chunks
        assert rb.stats().unread_bytes == 0
        # The reader may take a part of a frame that is being received, and three lists have only errors.
        assert num_lists <= 2 * rb.stats().frames + 3
    found = by_request(received)
    twice = found["late"].pop(0)
    for request in late, *good:
        check_stream(found[request.request_id], request)
    assert {chunk.error for request in good for chunk in found[request.request_id]} == {None}
    failed = [twice, *found["lora"], *(chunk for chunk in found["late"] if chunk.end)]
    codes = [ErrorCode.DUPLICATE_REQUEST, ErrorCode.UNSUPPORTED, ErrorCode.TIMEOUT, ErrorCode.TIMEOUT]
    assert [chunk.error and chunk.error.code for chunk in failed] == codes


async def test_streams_of_a_closed_client_end_with_its_code(one_worker: StartServed) -> None:
    """If the client is closed, each open stream ends with `client_closed`, and the next request raises `BusClosed`."""
    ends: dict[str, object] = {}
    async with one_worker() as (rb, *_):
        lists = rb.stream_many(map(endless, "abc"), max_in_flight=2)
        await anext(lists)
    with contextlib.suppress(rollbus.BusClosed):
        while chunks := await anext(lists):
            ends |= {chunk.request_id: chunk.error and chunk.error.code for chunk in chunks if chunk.end}
    assert ends == dict.fromkeys("ab", ErrorCode.CLIENT_CLOSED)


async def test_leaving_the_loop_aborts_all_requests(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """A caller that leaves the loop aborts all requests, with and without asyncio. Their ids and bytes are free."""
    requests = [endless(f"r{index}") for index in range(5)]

    def without_asyncio() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            with contextlib.closing(rb.stream_many(requests)) as lists:
                next(lists)
            asked = [greedy(index, 30, request_id=f"r{index}") for index in range(20)]
            found = by_request(chunk for chunks in rb.stream_many(asked, max_in_flight=6) for chunk in chunks)
            for request in asked:
                check_stream(found[request.request_id], request)

    async with one_worker() as (rb, _, engine):
        async with contextlib.aclosing(rb.stream_many(requests)) as lists:
            await anext(lists)
        await until_idle(engine, rb)
        with pytest.raises(rollbus.InvalidRequest, match="requests is 1; allowed"):
            await all_of(rb.stream_many(1))  # type: ignore[arg-type]
        assert not runtime_of(rb).inbox.shared
        await until_true(lambda: not rb.stats().unread_bytes)
        await asyncio.to_thread(without_asyncio)
        await until_idle(engine, rb)
