"""What a chaos run does to its fleet: a schedule that follows from a seed, and all that suffer it."""

import asyncio
import contextlib
import os
import random
import signal
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from rollbus.bus.nats.embedded import EmbeddedServer
from tests.support.patience import SOON_S
from tests.support.tcp_proxy import TcpProxy

__all__ = ["Fault", "Victims", "schedule", "victims"]

StartWorker = Callable[[int], AbstractAsyncContextManager[Process]]

KINDS = {
    # Out of a hundred, and how long it may last, in seconds: less and more than a lease, for what others only suspect.
    "worker killed": (35, 3.0),
    "worker stopped": (15, 10.0),
    "worker restarted": (10, 1.0),
    "server killed": (15, 3.0),
    "server restarted": (10, 0.0),
    "server stopped": (5, 6.0),
    "client cut": (5, 3.0),
    "client frozen": (5, 8.0),
}
"""Stopped is what got SIGSTOP, and SIGCONT later; restarted means in order. A client's connection is cut with a word to
both sides, or frozen without one."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    after_s: float
    """Seconds since the fault before it."""
    kind: str
    victim: int
    """Which worker, for those that befall a worker."""
    away_s: float
    """Until it is back, or until it is started again."""

    def __str__(self) -> str:
        """For people."""
        who = f" w{self.victim}" if self.kind.startswith("worker") else ""
        return f"{self.kind}{who} for {self.away_s:.1f} s"


def schedule(
    seed: int, *, num_workers: int, seconds_between: float, kinds: Collection[str] = tuple(KINDS)
) -> Iterator[Fault]:
    """Faults without end, the same for the same arguments.

    Args:
        num_workers: that may be befallen, the first ones.
    """
    rng = random.Random(seed)
    while True:
        kind = rng.choices(list(kinds), [KINDS[kind][0] for kind in kinds])[0]
        yield Fault(
            after_s=seconds_between * rng.uniform(0.5, 1.5),
            kind=kind,
            victim=rng.randrange(num_workers),
            # Often none: what comes back at once is the harder case to notice.
            away_s=rng.choice([0.0, rng.uniform(0, KINDS[kind][1])]),
        )


class Victims:
    """The server, the workers and the client's network; each suffers one fault at a time, several may suffer at once.

    Made by `victims`.
    """

    def __init__(self, server: EmbeddedServer, network: TcpProxy, start_worker: StartWorker) -> None:
        self.counts: Counter[str] = Counter()
        """Faults that were done, by kind."""
        self._server = server
        self._server_lock = asyncio.Lock()
        self._network = network
        self._network_lock = asyncio.Lock()
        self._start_worker = start_worker
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """Of the workers, as they live now."""
        return [worker.process.pid for worker in self._workers]

    async def suffer(self, fault: Fault) -> None:
        """Do it, and undo it when its time has come."""
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
            await _stop(self._server.pid, fault.away_s)
            return
        if fault.kind == "server killed":
            await self._server.kill()
            # How long it is away is what this fault is about.
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
            await _stop(worker.process.pid, fault.away_s)
            return
        # It may have ended by itself: see `revive`.
        if fault.kind == "worker restarted" and worker.process.returncode is None:
            worker.process.terminate()
            await worker.process.wait()
        # Kills it if it still runs.
        await worker.life.aclose()
        await asyncio.sleep(fault.away_s)
        await self._begin(fault.victim, worker)

    async def _begin(self, index: int, worker: "_Worker") -> None:
        worker.process = await worker.life.enter_async_context(self._start_worker(index))

    async def revive(self) -> None:
        """Start workers again that ended by themselves: one that finds no server when it starts does."""
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
        """Stop the workers in order; each must exit with 0."""
        for worker in self._workers:
            worker.process.terminate()
        async with asyncio.timeout(SOON_S):
            assert [await worker.process.wait() for worker in self._workers] == [0] * len(self._workers)


async def _stop(pid: int, away_s: float) -> None:
    """Let a process stand still for so long; without effect on one that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(away_s)
        finally:
            os.kill(pid, signal.SIGCONT)


@dataclass
class _Worker:
    """One worker, life after life."""

    life: contextlib.AsyncExitStack
    process: Process
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@contextlib.asynccontextmanager
async def victims(
    server: EmbeddedServer, network: TcpProxy, start_worker: StartWorker, num_workers: int
) -> AsyncIterator[Victims]:
    """Start workers, numbered from 0; all have ended when the block is left.

    Args:
        network: before the client.
    """
    found = Victims(server, network, start_worker)
    try:
        await found.start(num_workers)
        yield found
        await found.stop()
    finally:
        await found.end()
