"""Both ends of a queue: a client that collects publish results, and a worker that collects pulled requests."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

from rollbus.bus.nats.connection import Connection
from rollbus.bus.queue.publisher import PublishResult, QueuePublisher
from rollbus.bus.queue.puller import QueuedRequest, QueuePuller
from rollbus.bus.queue.streams import QueueLimits, stored_in
from rollbus.bus.subjects import Subjects
from rollbus.schemas.request import Lane
from tests.support.nats_server import opened

MODEL = "Qwen/Qwen3-30B"


class Publishing:
    """A client that publishes requests; `publishing` creates it."""

    def __init__(self, nats: Connection, fleet: str, name: str) -> None:
        self.nats = nats
        self.fleet, self.name = fleet, name
        self.publisher = QueuePublisher(nats, Subjects(fleet), name, self._add_result)
        self.results: dict[str, list[PublishResult]] = {}
        self._numbers = itertools.count()
        self._arrived = asyncio.Event()

    def _add_result(self, token: str, result: PublishResult) -> None:
        self.results.setdefault(token, []).append(result)
        self._arrived.set()

    async def send(
        self,
        data: bytes = b"x",
        *,
        lane: Lane = "normal",
        model: str = MODEL,
        msg_id: str | None = None,
        ttl_s: float = 60.0,
    ) -> str:
        """Publish without waiting; return the token."""
        token = f"token-{next(self._numbers)}"
        await self.publisher.publish(
            token=token, model=model, lane=lane, data=data, msg_id=msg_id or f"{self.name}.{token}", ttl_s=ttl_s
        )
        return token

    async def result(self, token: str) -> PublishResult:
        """Wait for the first result of a publish."""
        while token not in self.results:
            self._arrived.clear()
            await self._arrived.wait()
        return self.results[token][0]

    async def publish(
        self,
        data: bytes = b"x",
        *,
        lane: Lane = "normal",
        model: str = MODEL,
        msg_id: str | None = None,
        ttl_s: float = 60.0,
    ) -> PublishResult:
        """Publish and wait for the result."""
        return await self.result(await self.send(data, lane=lane, model=model, msg_id=msg_id, ttl_s=ttl_s))

    async def may_be_stored(self, seq: int, lane: Lane = "normal") -> bool:
        """Return True if the queue may hold the request that it stored just now under this number."""
        return (await stored_in(self.nats, Subjects(self.fleet), MODEL, lane)).may_hold(seq, 0.0)

    async def publish_all(self, *requests: bytes, lane: Lane = "normal") -> None:
        """Publish these requests and assert that the queue stores all of them."""
        tokens = [await self.send(data, lane=lane) for data in requests]
        for token in tokens:
            assert (result := await self.result(token)).ok, result


class Pulling:
    """A worker that pulls requests; `pulling` creates it."""

    def __init__(self, nats: Connection, fleet: str, model: str, capacity: int, limits: QueueLimits | None) -> None:
        self.nats = nats
        self.capacity = capacity
        self.num_held = 0
        self.puller = QueuePuller(
            nats, Subjects(fleet), model, room=self._room, on_request=self._add_request, limits=limits
        )
        self._requests: asyncio.Queue[QueuedRequest] = asyncio.Queue()

    def _room(self) -> int:
        return self.capacity - self.num_held

    def _add_request(self, request: QueuedRequest) -> None:
        self.num_held += 1
        self._requests.put_nowait(request)

    @property
    def num_unseen(self) -> int:
        """Number of pulled requests that the test has not read yet."""
        return self._requests.qsize()

    async def take(self) -> QueuedRequest:
        """Wait for the next request; it stays unacked."""
        return await self._requests.get()

    async def finish(self, request: QueuedRequest) -> bytes:
        """Ack a request, free its slot and return its content."""
        await request.ack()
        self.num_held -= 1
        self.puller.wake()
        return request.data

    async def take_all(self, count: int) -> list[bytes]:
        """Receive and finish this number of requests, one after another."""
        return [await self.finish(await self.take()) for _ in range(count)]


@contextlib.asynccontextmanager
async def publishing(url: str, fleet: str, name: str = "alice") -> AsyncIterator[Publishing]:
    """Run a publishing client with its own connection."""
    async with opened(url) as nats, asyncio.TaskGroup() as tasks:
        client = Publishing(nats, fleet, name)
        await client.publisher.start()
        running = tasks.create_task(client.publisher.run())
        try:
            yield client
        finally:
            running.cancel()


@contextlib.asynccontextmanager
async def pulling(
    url: str, fleet: str, *, model: str = MODEL, capacity: int = 1, limits: QueueLimits | None = None
) -> AsyncIterator[Pulling]:
    """Run a pulling worker with its own connection."""

    async def wake() -> None:
        worker.puller.wake()

    async with opened(url, on_reconnect=wake) as nats, asyncio.TaskGroup() as tasks:
        worker = Pulling(nats, fleet, model, capacity, limits)
        running = tasks.create_task(worker.puller.run())
        try:
            yield worker
        finally:
            running.cancel()
