"""What a client does with frames that are missing, doubled, of another life or for nobody: sent by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from nats.aio.msg import Msg

import bus
from bus import GenerateRequest, SamplingParams
from bus.connection import Connection, close_connection, open_connection, publish, subscribe
from bus.subjects import Subjects
from schemas.chunk import Chunk, End, FinishReason
from schemas.messages import (
    WIRE_VERSION,
    Frame,
    LinkMessage,
    RequestKey,
    RequestMessage,
    decode_link_message,
    decode_request_message,
    encode,
    encode_json,
    request_id_of,
)
from schemas.presence import WorkerPresence, WorkerState


@dataclass
class HandWorker:
    """A worker whose every message the test writes."""

    nats: Connection
    subjects: Subjects
    incarnation: str = "life-1"
    requests: asyncio.Queue[RequestMessage] = field(default_factory=lambda: asyncio.Queue(100))
    links: asyncio.Queue[LinkMessage] = field(default_factory=lambda: asyncio.Queue(100))

    async def announce(self, state: WorkerState = WorkerState.SERVING) -> None:
        """Say that this worker lives."""
        presence = WorkerPresence(
            worker="hand",
            incarnation=self.incarnation,
            model="m",
            state=state,
            weight_version=0,
            in_flight=0,
            free_slots=1,
            uptime_s=0,
            lease_s=60,
        )
        await publish(self.nats, self.subjects.presence("hand"), encode_json(presence))

    async def frame(self, number: int, *chunks: Chunk, admitted: tuple[RequestKey, ...] = ()) -> None:
        """Send a frame of the current incarnation."""
        frame = Frame(WIRE_VERSION, self.incarnation, number, list(admitted), list(chunks))
        await publish(self.nats, self.subjects.frame("me", "hand"), encode(frame))

    async def next_key(self) -> RequestKey:
        """The key of the next request that arrives."""
        message = await self.requests.get()
        return RequestKey(request_id_of(message.request) or "", message.attempt, message.child)


@contextlib.asynccontextmanager
async def hand_worker(nats_url: str, fleet: str) -> AsyncIterator[tuple[HandWorker, bus.Client]]:
    """A worker by hand, announced, and the client `me`."""
    nats = await open_connection(nats_url, name="hand")
    worker = HandWorker(nats, Subjects(fleet))

    async def take_request(message: Msg) -> None:
        worker.requests.put_nowait(decode_request_message(message.data))

    async def take_link(message: Msg) -> None:
        worker.links.put_nowait(decode_link_message(message.data))

    async def answer_ping(_message: Msg) -> None:
        await worker.announce()

    try:
        await subscribe(nats, worker.subjects.ping, answer_ping)
        await subscribe(nats, worker.subjects.requests_for("m"), take_request)
        await subscribe(nats, worker.subjects.links_to("hand"), take_link)
        # The server knows them before the client asks who is there.
        await nats.flush()
        async with bus.connect(nats_url, fleet=fleet, client="me") as rb, asyncio.timeout(30):
            await rb.fleet.wait_for_workers()
            yield worker, rb
    finally:
        await close_connection(nats)


def chunk(key: RequestKey, index: int, token: int, *, end: bool = False, total: int = 0) -> Chunk:
    """One token without logprobs and routing."""
    return Chunk(
        request_id=key.request_id,
        attempt=key.attempt,
        child=key.child,
        chunk_index=index,
        weight_version=0,
        token_ids_data=np.array([token], "<i4").tobytes(),
        end=End(finish_reason=FinishReason.LENGTH, num_tokens=total, num_rows=0) if end else None,
    )


def request(max_tokens: int = 3, **fields: object) -> GenerateRequest:
    """A greedy request without logprobs."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=None)
    return GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling, **fields)  # type: ignore[arg-type]


async def test_after_a_gap_the_rest_is_asked_for_again(nats_url: str, fleet: str) -> None:
    """A missing frame: what came before stays, the next attempt's prompt ends with it, the old one is told to stop."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request()))
        first = await worker.next_key()
        await worker.frame(0, chunk(first, 0, 7), admitted=(first,))
        await worker.frame(2, chunk(first, 2, 9, end=True, total=3))
        message = await worker.requests.get()
        resumed = msgspec.msgpack.decode(message.request)
        second = RequestKey(first.request_id, message.attempt, 0)
        await worker.frame(3, chunk(second, 0, 8), chunk(second, 1, 9, end=True, total=2), admitted=(second,))
        generation = await completing
        stopped = await worker.links.get()

    assert (message.attempt, np.frombuffer(resumed["prompt_token_ids"], "<i4").tolist()) == (1, [1, 2, 7])
    assert resumed["sampling"]["max_tokens"] == 2
    assert list(generation.token_ids) == [7, 8, 9]
    assert generation.attempts == 2
    assert first in stopped.abort


async def test_a_doubled_frame_counts_once(nats_url: str, fleet: str) -> None:
    """The same frame twice is taken once."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.frame(1, chunk(key, 1, 8, end=True, total=2))
        generation = await completing
        assert rb.stats().duplicate_frames == 1

    assert list(generation.token_ids) == [7, 8]
    assert generation.attempts == 1


async def test_another_life_of_a_worker_ends_what_its_last_one_had(nats_url: str, fleet: str) -> None:
    """A frame of a new incarnation, before any announcement of it, shows that the old one's requests are lost."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        lost = tasks.create_task(rb.complete(request(2)))
        first = await worker.next_key()
        await worker.frame(0, chunk(first, 0, 7), admitted=(first,))
        other = tasks.create_task(rb.complete(request(1)))
        key = await worker.next_key()
        worker.incarnation = "life-2"
        await worker.frame(0, chunk(key, 0, 5, end=True, total=1), admitted=(key,))
        second = await worker.next_key()
        await worker.frame(1, chunk(second, 0, 8, end=True, total=1), admitted=(second,))
        generation = await lost

    assert list(other.result().token_ids) == [5]
    assert list(generation.token_ids) == [7, 8]


async def test_a_worker_that_says_goodbye_in_another_life_is_gone(nats_url: str, fleet: str) -> None:
    """`stopped`, under whatever incarnation, ends everything that the worker had."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(1)))
        first = await worker.next_key()
        await worker.frame(0, admitted=(first,))
        worker.incarnation = "life-2"
        await worker.announce(WorkerState.STOPPED)
        await worker.announce()
        second = await worker.next_key()
        await worker.frame(0, chunk(second, 0, 8, end=True, total=1), admitted=(second,))

    assert list(completing.result().token_ids) == [8]


async def test_only_one_worker_serves_an_attempt(nats_url: str, fleet: str) -> None:
    """A second worker that reports with an attempt which another holds is told to stop, and is not listened to."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        frame = Frame(WIRE_VERSION, "x", 0, [key], [chunk(key, 0, 666), chunk(key, 1, 666, end=True, total=2)])
        await publish(worker.nats, worker.subjects.frame("me", "impostor"), encode(frame))
        await worker.frame(1, chunk(key, 1, 8, end=True, total=2))
        generation = await completing

    assert list(generation.token_ids) == [7, 8]


async def test_aborts_of_thousands_fit_into_messages(nats_url: str, fleet: str) -> None:
    """Giving up very many requests with long ids at once tells the worker of each."""
    requests = [request(request_id=f"{'x' * 100}{i}") for i in range(90)]
    async with hand_worker(nats_url, fleet) as (worker, rb):
        results = rb.complete_many(requests, max_in_flight=90)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(anext(results))
            keys = [await worker.next_key() for _ in requests]
            await worker.frame(0, chunk(keys[0], 0, 5, end=True, total=1), admitted=tuple(keys))
        await results.aclose()
        aborted = (await worker.links.get()).abort

    assert set(aborted) == set(keys[1:])
