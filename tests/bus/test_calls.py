"""The caller's side of a call that the bus thread serves, and the count of unread bytes."""

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from rollbus.bus.client.calls import Call, CallResult, Inbox
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RequestFailed
from rollbus.schemas.limits import MAX_SEED
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams


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


def test_a_call_without_streaming_wakes_its_caller_only_at_its_end() -> None:
    """Chunks of a call that is not streamed do not wake the caller. Only the end of the call does."""
    box, told = inbox()
    call = new_call(box, streams=False)
    call.deliver([chunk_of(0)])
    assert told == []
    call.finish(CallResult((), None))
    assert len(told) == 1


def test_a_late_notification_does_not_change_the_end_time_of_a_call() -> None:
    """The end time of a call is the time at which it ended, also if a blocked loop notifies the caller later."""
    box, told = inbox()
    call = new_call(box, streams=False)
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
    """A failed call yields the received chunks before it raises its error."""
    box, _ = inbox()
    call = new_call(box)
    call.deliver([chunk_of(0), chunk_of(1)])
    call.finish(CallResult((), RequestFailed(code=ErrorCode.WORKER_LOST, message="gone")))
    chunks = [await call.next_chunk(), await call.next_chunk()]

    assert [chunk.chunk_index for chunk in chunks if chunk is not None] == [0, 1]
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


def test_an_invalid_request_raises_its_error_in_the_thread_of_the_caller() -> None:
    """An invalid request raises its error when the caller opens it, not on the bus thread."""
    box, _ = inbox()
    sampling = SamplingParams(n=2, seed=MAX_SEED - 1)
    assert len(Call(GenerateRequest(prompt_token_ids=[1], sampling=sampling), box, False).payloads) == 2
    with pytest.raises(InvalidRequest):
        Call(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(n=2, seed=MAX_SEED)), box, False)
