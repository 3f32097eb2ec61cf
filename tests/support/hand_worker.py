"""A worker whose messages the test writes, for faults that real workers show too rarely."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from nats.aio.msg import Msg

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.nats.connection import Connection, open_connection, publish, subscribe
from rollbus.bus.protocol.queue.placement import rendezvous
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.bus.queue.puller import QueuedRequest, QueuePuller
from rollbus.bus.queue.streams import ensure_queue
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import Chunk, ChunkError, End, FinishReason
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import (
    Frame,
    KvTransfer,
    LinkMessage,
    RequestKey,
    RequestMessage,
    decode_client_presence,
    decode_link_message,
    decode_request,
    decode_request_message,
    encode,
    encode_json,
)
from rollbus.schemas.presence import ClientPresence, EngineStats, WorkerState
from rollbus.schemas.request import request_id_of
from rollbus.schemas.weights import OpenTransfer
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.fleet import capabilities, presence
from tests.support.waits import SOON_S, UNHURRIED_LEASE_S

MODEL = "m"


@dataclass(frozen=True)
class Taken:
    """A request that the worker received from the queue or directly."""

    message: RequestMessage
    queued: QueuedRequest | None
    """The queue message; None for a direct request."""

    @property
    def key(self) -> RequestKey:
        """The key for frames about this request."""
        return RequestKey(request_id_of(self.message.request) or "", self.message.attempt, self.message.child)

    @property
    def keys(self) -> tuple[RequestKey, ...]:
        """The keys of all child requests in the message."""
        return self.key, *(replace(self.key, child=other.child) for other in self.message.siblings)

    @property
    def request(self) -> GenerateRequest:
        """The decoded request."""
        return decode_request(self.message.request)


@dataclass
class HandWorker:
    """A hand-written worker, which acks each queued request immediately and sends no offer to the client."""

    nats: Connection
    subjects: Subjects
    name: str = "hand"
    incarnation: str = "life-1"
    link: int = 0
    free_slots: int = 1
    in_flight: int = 0
    weight_version: int = 0
    cache_epoch: int = 0
    reads_siblings: bool = False
    has_backlog: bool = False
    start_left_s: float | None = None
    client: str = "me"
    state: WorkerState = WorkerState.SERVING
    """The state in the latest presence; a stopped worker does not answer pings."""
    client_incarnation: str = ""
    """The incarnation in the latest presence or request of the client."""
    requests: asyncio.Queue[Taken] = field(default_factory=lambda: asyncio.Queue(10_000))
    links: asyncio.Queue[LinkMessage] = field(default_factory=lambda: asyncio.Queue(10_000))
    presences: asyncio.Queue[ClientPresence] = field(default_factory=lambda: asyncio.Queue(10_000))

    async def announce(
        self, state: WorkerState = WorkerState.SERVING, *, lease_s: float = 60.0, transfer: OpenTransfer | None = None
    ) -> None:
        """Publish the presence of this worker."""
        self.state = state
        said = presence(
            worker=self.name,
            transfer=transfer,
            incarnation=self.incarnation,
            model=MODEL,
            state=state,
            weight_version=self.weight_version,
            free_slots=self.free_slots,
            in_flight=self.in_flight,
            uptime_s=0.0,
            lease_s=lease_s,
            start_left_s=self.start_left_s,
            cache_epoch=self.cache_epoch,
            capabilities=capabilities(request_groups=True, group_backlog=self.has_backlog)
            if self.reads_siblings
            else None,
            # The worker claims to prefill any prompt immediately.
            engine_stats=EngineStats(prefill_tokens_per_s=1e9),
        )
        await publish(self.nats, self.subjects.presence(self.name), encode_json(said))

    async def frame(self, number: int, *chunks: Chunk, admitted: tuple[RequestKey, ...] = ()) -> None:
        """Publish a frame on the current link; a frame without content is a heartbeat."""
        frame = Frame(
            WIRE_VERSION, self.incarnation, number, list(admitted), list(chunks), self.link, self.client_incarnation
        )
        await publish(self.nats, self.subjects.frame(self.client, self.name), encode(frame))

    async def take(self) -> Taken:
        """Wait for the next request."""
        return await self.requests.get()

    async def next_key(self) -> RequestKey:
        """Wait for the next request and return its key."""
        return (await self.take()).key

    async def next_link(self) -> LinkMessage:
        """Wait for the client's next message about the current link."""
        while True:
            message = await self.links.get()
            if (message.incarnation, message.link) == (self.incarnation, self.link):
                return message

    async def acked(self, number: int) -> LinkMessage:
        """Wait for the next message that acknowledges all frames below `number`."""
        while (message := await self.next_link()).acked < number:
            pass
        return message

    async def resend_wanted(self) -> LinkMessage:
        """Wait for the next message that requests frames again."""
        while not (message := await self.next_link()).resend:
            pass
        return message

    async def aborted(self, count: int = 1) -> list[RequestKey]:
        """Wait until the client has aborted `count` requests and return their keys."""
        keys: list[RequestKey] = []
        while len(keys) < count:
            keys += (await self.links.get()).abort
        return keys

    def add_queued(self, queued: QueuedRequest) -> None:
        """Store a request from the queue."""
        self._add(Taken(decode_request_message(queued.data), queued))

    async def receive_direct(self, message: Msg) -> None:
        """Store a direct request."""
        self._add(Taken(decode_request_message(message.data), None))

    def _add(self, taken: Taken) -> None:
        self.client_incarnation = taken.message.incarnation
        self.requests.put_nowait(taken)

    async def receive_link(self, message: Msg) -> None:
        """Store a link message of the client."""
        self.links.put_nowait(decode_link_message(message.data))

    async def receive_presence(self, message: Msg) -> None:
        """Store a client's presence."""
        presence = decode_client_presence(message.data)
        self.client_incarnation = presence.incarnation
        self.presences.put_nowait(presence)

    async def answer_ping(self, _message: Msg) -> None:
        """Publish the presence of this worker, unless it has stopped."""
        if self.state is not WorkerState.STOPPED:
            await self.announce(self.state)


@contextlib.asynccontextmanager
async def worker_by_hand(
    nats_url: str, fleet: str, name: str = "hand", *, pulls: bool = True, acks: bool = True
) -> AsyncIterator[HandWorker]:
    """Run a hand-written worker that answers pings.

    Args:
        pulls: pull requests from the queue.
        acks: ack the pulled requests.
    """
    nats = await open_connection(nats_url, name=name, timeout_s=SOON_S)
    worker = HandWorker(nats, Subjects(fleet), name=name)
    acking: asyncio.Queue[QueuedRequest] = asyncio.Queue(10_000)

    def add(queued: QueuedRequest) -> None:
        worker.add_queued(queued)
        acking.put_nowait(queued)

    async def ack() -> None:
        while True:
            queued = await acking.get()
            if acks:
                await queued.ack()

    try:
        await ensure_queue(nats, worker.subjects, MODEL)
        await subscribe(nats, worker.subjects.ping, worker.answer_ping)
        await subscribe(nats, worker.subjects.links_to(name), worker.receive_link)
        await subscribe(nats, worker.subjects.directs_to(name), worker.receive_direct)
        await subscribe(nats, worker.subjects.clients, worker.receive_presence)
        # The server must know the subscriptions before a client pings.
        await nats.flush()
        async with asyncio.TaskGroup() as tasks:
            puller = QueuePuller(nats, worker.subjects, MODEL, room=lambda: 1000, on_request=add)
            background = [tasks.create_task(ack())]
            if pulls:
                background.append(tasks.create_task(puller.run()))
            yield worker
            for task in background:
                task.cancel()
    finally:
        await nats.shut()


@contextlib.asynccontextmanager
async def hand_worker(nats_url: str, fleet: str) -> AsyncIterator[tuple[HandWorker, rollbus.Client]]:
    """Run a hand-written worker and the client `me`, which knows the worker."""
    async with (
        worker_by_hand(nats_url, fleet) as worker,
        rollbus.connect(nats_url, fleet=fleet, client="me") as rb,
        asyncio.timeout(SOON_S),
    ):
        await rb.fleet.wait_for_workers()
        yield worker, rb


@contextlib.asynccontextmanager
async def session_worker(nats_url: str, fleet: str) -> AsyncIterator[tuple[HandWorker, rollbus.Client, str]]:
    """Run a hand-written worker, the client `me` and a session of this worker; a second worker pulls nothing."""
    session = next(f"s{i}" for i in range(100) if rendezvous(f"s{i}", ["hand", "idle"]) == "hand")
    async with worker_by_hand(nats_url, fleet, "idle", pulls=False), hand_worker(nats_url, fleet) as (worker, rb):
        await rb.fleet.wait_for_workers(2)
        yield worker, rb, session


def chunk(key: RequestKey, index: int, *tokens: int, total: int | None = None) -> Chunk:
    """Return a chunk of tokens without logprobs and routed experts; `total` makes it terminal."""
    return Chunk(
        request_id=key.request_id,
        attempt=key.attempt,
        child=key.child,
        chunk_index=index,
        weight_version=0,
        token_ids_data=np.array(tokens, "<i4").tobytes(),
        end=None if total is None else End(finish_reason=FinishReason.LENGTH, num_tokens=total, num_rows=0),
    )


def failure(key: RequestKey, index: int, code: ErrorCode, total: int = 0) -> Chunk:
    """Return a terminal chunk with an error."""
    return Chunk(
        request_id=key.request_id,
        attempt=key.attempt,
        child=key.child,
        chunk_index=index,
        weight_version=0,
        end=End(finish_reason=FinishReason.ERROR, num_tokens=total, num_rows=0, error=ChunkError(code, "by hand")),
    )


def request(max_tokens: int = 3, **fields: object) -> GenerateRequest:
    """Return a greedy request without logprobs."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=None)
    return GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling, **fields)  # type: ignore[arg-type]


# An engine that waits at gates until the test opens them, and a worker with this engine.


class GatedEngine(SyntheticEngine):
    """Waits at a gate before it starts, steps, adds a request or closes; `reached` shows which gate it waits at."""

    def __init__(self, *closed: str, config: SyntheticConfig | None = None) -> None:
        super().__init__(config)
        self.gates = {name: asyncio.Event() for name in ("start", "steps", "add", "close")}
        self.reached = {name: asyncio.Event() for name in self.gates}
        for name in self.gates.keys() - set(closed):
            self.gates[name].set()

    async def _pass(self, name: str) -> None:
        self.reached[name].set()
        await self.gates[name].wait()

    async def start(self) -> None:
        """Wait at the gate, then start."""
        await self._pass("start")
        await super().start()

    async def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Wait at the gate, then yield all steps."""
        await self._pass("steps")
        async for steps in super().steps():
            yield steps

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Wait at the gate, then add the request."""
        await self._pass("add")
        await super().add(key, request, kv)

    async def close(self) -> None:
        """Wait at the gate, then close."""
        await self._pass("close")
        await super().close()


@contextlib.asynccontextmanager
async def running(
    nats_url: str, fleet: str, engine: SyntheticEngine, **fields: object
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """Run a worker `w` on `engine`; cancel it at the end of the block if it still runs."""
    fields = {"worker_id": "w", "model": "synthetic", "lease_s": UNHURRIED_LEASE_S, "listen_s": 0.0, **fields}
    worker = Worker(WorkerConfig(nats_url=nats_url, fleet=fleet, **fields), engine)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(worker.run(), name="worker")
        try:
            yield worker, task
        finally:
            task.cancel()
