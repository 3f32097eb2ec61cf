"""The faults of a chaos run: a schedule that follows from a seed, and the processes and connections that it affects."""

import asyncio
import contextlib
import os
import random
import signal
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from rollbus.bus.nats.embedded import EmbeddedServer
from tests.support.tcp_proxy import TcpProxy
from tests.support.waits import SOON_S

StartWorker = Callable[[int], AbstractAsyncContextManager[Process]]

KINDS = {
    # Weight in percent and maximum duration in seconds. Durations are shorter and longer than a lease, because a frozen
    # worker is only suspected.
    "worker killed": (35, 3.0),
    "worker stopped": (15, 10.0),
    "worker restarted": (10, 1.0),
    "server killed": (15, 3.0),
    "server restarted": (10, 0.0),
    "server stopped": (5, 6.0),
    "client cut": (5, 3.0),
    "client frozen": (5, 8.0),
}
"""A stopped process gets SIGSTOP, and SIGCONT later.

A restarted process is stopped in order. A client's connection is cut with an error on both sides, or frozen without
one.
"""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    after_s: float
    """Seconds since the previous fault."""
    kind: str
    victim: int
    """Number of the worker, for faults of workers."""
    away_s: float
    """Seconds until the process or connection is restored or restarted."""

    def __str__(self) -> str:
        """Return a description for the report."""
        who = f" w{self.victim}" if self.kind.startswith("worker") else ""
        return f"{self.kind}{who} for {self.away_s:.1f} s"


def schedule(
    seed: int | str, *, num_workers: int, seconds_between: float, kinds: Mapping[str, tuple[int, float]] = KINDS
) -> Iterator[Fault]:
    """Yield faults without end, the same for the same arguments.

    Args:
        num_workers: number of workers that may have faults, counted from the first one.
        kinds: weight and maximum duration in seconds of each kind.
    """
    rng = random.Random(seed)
    while True:
        kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        yield Fault(
            after_s=seconds_between * rng.uniform(0.5, 1.5),
            kind=kind,
            victim=rng.randrange(num_workers),
            # Often 0, because an immediate return is harder to detect.
            away_s=rng.choice([0.0, rng.uniform(0, kinds[kind][1])]),
        )


class Victims:
    """The server, the workers and the client's network. Each has one fault at a time, and several may have one at once.

    `victims` creates it.
    """

    def __init__(self, server: EmbeddedServer, network: TcpProxy, start_worker: StartWorker) -> None:
        self.counts: Counter[str] = Counter()
        """Completed faults by kind."""
        self._server = server
        self._server_lock = asyncio.Lock()
        self._network = network
        self._network_lock = asyncio.Lock()
        self._start_worker = start_worker
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the current worker processes."""
        return [worker.process.pid for worker in self._workers]

    async def inject(self, fault: Fault) -> None:
        """Cause the fault, and undo it after its duration."""
        if fault.kind.startswith("server"):
            async with self._server_lock:
                await self._strike_server(fault)
        elif fault.kind.startswith("client"):
            async with self._network_lock:
                await self._strike_network(fault)
        else:
            worker = self._workers[fault.victim]
            async with worker.lock:
                await self._strike_worker(fault, worker)
        await self.revive()
        self.counts[fault.kind] += 1

    async def _strike_server(self, fault: Fault) -> None:
        if fault.kind == "server stopped":
            await stop_for(self._server.pid, fault.away_s)
            return
        if fault.kind == "server killed":
            await self._server.kill()
            # The fault consists of this outage.
            await asyncio.sleep(fault.away_s)
        await self._server.restart()

    async def _strike_network(self, fault: Fault) -> None:
        if fault.kind == "client cut":
            self._network.cut()
            await asyncio.sleep(fault.away_s)
            await self._network.restore()
        else:
            self._network.freeze()
            await asyncio.sleep(fault.away_s)
            self._network.thaw()

    async def _strike_worker(self, fault: Fault, worker: "_Worker") -> None:
        if fault.kind == "worker stopped":
            await stop_for(worker.process.pid, fault.away_s)
            return
        # The worker may have exited by itself: see `revive`.
        if fault.kind == "worker restarted" and worker.process.returncode is None:
            worker.process.terminate()
            await worker.process.wait()
        # Kills the process if it still runs.
        await worker.life.aclose()
        await asyncio.sleep(fault.away_s)
        await self._begin(fault.victim, worker)

    async def _begin(self, index: int, worker: "_Worker") -> None:
        worker.process = await worker.life.enter_async_context(self._start_worker(index))

    async def revive(self) -> None:
        """Restart workers that exited by themselves, as a worker does if it finds no server when it starts."""
        for index, worker in enumerate(self._workers):
            async with worker.lock:
                if worker.process.returncode is not None:
                    await worker.life.aclose()
                    await self._begin(index, worker)

    async def start(self, num_workers: int) -> None:
        """Start the workers."""
        for index in range(num_workers):
            life = contextlib.AsyncExitStack()
            self._workers.append(_Worker(life, await life.enter_async_context(self._start_worker(index))))

    async def end(self) -> None:
        """Kill the workers that still run."""
        for worker in self._workers:
            await worker.life.aclose()

    async def stop(self) -> None:
        """Stop the workers in order and check that each exits with 0."""
        for worker in self._workers:
            worker.process.terminate()
        async with asyncio.timeout(SOON_S):
            assert [await worker.process.wait() for worker in self._workers] == [0] * len(self._workers)


async def stop_for(pid: int, away_s: float) -> None:
    """Freeze a process for this time. A process that has exited is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(away_s)
        finally:
            os.kill(pid, signal.SIGCONT)


@dataclass
class _Worker:
    """One worker and its current process."""

    life: contextlib.AsyncExitStack
    process: Process
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@contextlib.asynccontextmanager
async def victims(
    server: EmbeddedServer, network: TcpProxy, start_worker: StartWorker, num_workers: int
) -> AsyncIterator[Victims]:
    """Start workers, numbered from 0, and end all of them when the block is left.

    Args:
        network: proxy in front of the client.
    """
    found = Victims(server, network, start_worker)
    try:
        await found.start(num_workers)
        yield found
        await found.stop()
    finally:
        await found.end()
