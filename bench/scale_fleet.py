"""The fleet that `bench.scale` measures: server, workers and clients in separate processes, and their resources."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

import rollbus
from bench.cpu import cpu_s
from bench.memory import resident_bytes
from bench.scale_sides import FLEET, START_TIMEOUT_S, Counts
from bench.ways import Way, running
from rollbus.bus.nats.connection import Connection, open_connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.queue.streams import QueueLimits, ensure_queue, queue_depths
from rollbus.bus.subjects import Subjects
from rollbus.workers.engines.synthetic.config import SyntheticConfig

MODEL: Final = "synthetic"
"""Name of the model in `bench.many_workers`."""
PER_PROCESS: Final = 16
"""Maximum number of workers or clients in one process: 64 workers are in four processes."""


@dataclass(frozen=True, slots=True)
class Side:
    """The resources that all processes of one side use."""

    cpu_s: float
    rss_bytes: int
    """Resident bytes. Shared libraries count in each process."""

    @classmethod
    def of(cls, processes: Sequence[int]) -> "Side":
        """Return the resources that these processes have used so far."""
        return cls(sum(map(cpu_s, processes)), sum(map(resident_bytes, processes)))

    def since(self, earlier: "Side") -> "Side":
        """Return the CPU seconds between `earlier` and this, with the memory of this."""
        return Side(self.cpu_s - earlier.cpu_s, self.rss_bytes)


@dataclass(frozen=True, slots=True)
class Used:
    """The resources that each side has used until one moment, or between two moments."""

    at_s: float
    worker: Side
    client: Side
    server: Side

    def since(self, earlier: "Used") -> "Used":
        """Return the resources that were used between `earlier` and this."""
        return Used(
            self.at_s - earlier.at_s,
            self.worker.since(earlier.worker),
            self.client.since(earlier.client),
            self.server.since(earlier.server),
        )

    @property
    def sides(self) -> dict[str, Side]:
        """The resources of each side, by name."""
        return {"worker": self.worker, "client": self.client, "server": self.server}


class Queue:
    """Reads the number of requests in the model's queue.

    Args:
        nats: open connection.
    """

    def __init__(self, nats: Connection) -> None:
        self._nats = nats

    async def num_waiting(self) -> int:
        """Return the number of requests that no worker has pulled."""
        return sum(depth.waiting for depth in await queue_depths(self._nats, Subjects(FLEET), (MODEL,)))


class Fleet:
    """A running fleet.

    Args:
        server: server of all workers and clients.
        worker_ids: process ids of the workers.
        clients: processes of the clients.
        client_ids: process ids of the clients.
    """

    def __init__(
        self, server: EmbeddedServer, worker_ids: Sequence[int], clients: Sequence[Way], client_ids: Sequence[int]
    ) -> None:
        self._server = server
        self._worker_ids = worker_ids
        self._clients, self._client_ids = clients, client_ids

    def used(self) -> Used:
        """Return the resources that each side has used so far."""
        sides = Side.of(self._worker_ids), Side.of(self._client_ids), Side.of([self._server.pid])
        return Used(time.monotonic(), *sides)

    async def counts(self) -> Counts:
        """Return the counts of all clients so far.

        Raises:
            RuntimeError: a request has failed, or a process has ended.
        """
        counts = await _ask(self._clients, "count")
        if any(one.failed for one in counts):
            raise RuntimeError("requests have failed; the clients printed the errors to stderr")
        return Counts(done=sum(one.done for one in counts), frames=sum(one.frames for one in counts))

    async def begin(self, num_requests: int, num_tokens: int, max_in_flight: int, *, streams: bool = False) -> None:
        """Let each client start `num_requests` requests.

        Args:
            streams: read the tokens as they arrive. False: read whole results.
        """
        await _ask(self._clients, "stream" if streams else "run", num_requests, num_tokens, max_in_flight)

    async def finish(self) -> None:
        """Wait until all requests have ended."""
        await _ask(self._clients, "wait")

    async def pause(self) -> None:
        """Pause the workers, so that requests wait in the queue."""
        async with rollbus.connect(self._server.url, fleet=FLEET) as rb:
            await rb.fleet.pause()

    async def resume(self) -> None:
        """Resume the workers."""
        async with rollbus.connect(self._server.url, fleet=FLEET) as rb:
            await rb.fleet.resume()

    @asynccontextmanager
    async def wide_queue(self, max_msgs: int) -> AsyncIterator[Queue]:
        """Raise the limit of the queue to `max_msgs` requests.

        The limit lasts until a worker finds that the queue is missing and creates it.
        """
        nats = await open_connection(self._server.url, name="bench")
        try:
            await ensure_queue(nats, Subjects(FLEET), MODEL, QueueLimits(max_msgs=max_msgs))
            yield Queue(nats)
        finally:
            await nats.shut()


@asynccontextmanager
async def started_fleet(num_workers: int, num_clients: int, engine: SyntheticConfig) -> AsyncIterator[Fleet]:
    """Run a fleet while the body runs, and wait until all its workers serve."""
    async with EmbeddedServer() as server, AsyncExitStack() as stack:
        url = server.url

        async def start(side: str, count: int, *args: object) -> list[Way]:
            ways = []
            for first in range(0, count, PER_PROCESS):
                prefix, size = f"{side[0]}{first}-", min(PER_PROCESS, count - first)
                way = running(prefix, "bench.scale_sides", side, url, prefix, size, *args)
                ways.append(await stack.enter_async_context(way))
            return ways

        workers = await start("workers", num_workers, msgspec.json.encode(engine).decode())
        async with rollbus.connect(url, fleet=FLEET) as rb:
            await rb.fleet.wait_for_workers(num_workers, timeout_s=START_TIMEOUT_S)
        clients = await start("clients", num_clients)
        yield Fleet(server, await _ids(workers), clients, await _ids(clients))


async def _ids(ways: Sequence[Way]) -> list[int]:
    return [one.process for one in await _ask(ways, "count")]


async def _ask(ways: Sequence[Way], *question: object) -> list[Counts]:
    """Send a command to one process after the other. Return the answers."""
    return [Counts(**await way.ask(*question)) for way in ways]
