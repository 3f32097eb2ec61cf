"""What a chaos run does to its fleet: a schedule that follows from a seed, and server and workers that suffer it."""

import asyncio
import contextlib
import random
import signal
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from bus.embedded import EmbeddedServer

__all__ = ["Fault", "Victims", "schedule", "victims"]

StartWorker = Callable[[int], AbstractAsyncContextManager[Process]]

SHARES = {
    "worker killed": 40,
    "worker stopped": 15,
    "worker restarted": 15,
    "server killed": 20,
    "server restarted": 10,
}
"""A stopped worker is one that got SIGSTOP, and SIGCONT later; restarted means in order."""
MAX_AWAY_S = {"worker killed": 3.0, "worker stopped": 10.0, "worker restarted": 1.0, "server killed": 3.0}
"""How long it may stay away: less and more than a lease, for those that are stopped."""
STOPS_WITHIN_S = 30.0
"""For what takes milliseconds: only a failing run waits as long."""


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


def schedule(seed: int, *, num_workers: int, seconds_between: float) -> Iterator[Fault]:
    """Faults without end, the same for the same arguments."""
    rng = random.Random(seed)
    while True:
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        yield Fault(
            after_s=seconds_between * rng.uniform(0.5, 1.5),
            kind=kind,
            victim=rng.randrange(num_workers),
            # Often none: what comes back at once is the harder case to notice.
            away_s=rng.choice([0.0, rng.uniform(0, MAX_AWAY_S.get(kind, 0.0))]),
        )


class Victims:
    """The server and the workers; each suffers one fault at a time, and several may suffer at once.

    Made by `victims`.
    """

    def __init__(self, server: EmbeddedServer, start_worker: StartWorker) -> None:
        self.counts: Counter[str] = Counter()
        """Faults that were done, by kind."""
        self._server = server
        self._server_lock = asyncio.Lock()
        self._start_worker = start_worker
        self._workers: list[_Worker] = []

    async def suffer(self, fault: Fault) -> None:
        """Do it, and undo it when its time has come."""
        if fault.kind.startswith("server"):
            async with self._server_lock:
                await self._strike_server(fault)
        else:
            worker = self._workers[fault.victim]
            async with worker.lock:
                await self._strike_worker(fault, worker)
        self.counts[fault.kind] += 1

    async def _strike_server(self, fault: Fault) -> None:
        if fault.kind == "server killed":
            await self._server.kill()
            # How long it is away is what this fault is about.
            await asyncio.sleep(fault.away_s)
        await self._server.restart()

    async def _strike_worker(self, fault: Fault, worker: "_Worker") -> None:
        if fault.kind == "worker stopped":
            worker.process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.away_s)
            finally:
                worker.process.send_signal(signal.SIGCONT)
            return
        if fault.kind == "worker restarted":
            worker.process.terminate()
            await worker.process.wait()
        # Kills it if it still runs.
        await worker.life.aclose()
        await asyncio.sleep(fault.away_s)
        worker.process = await worker.life.enter_async_context(self._start_worker(fault.victim))

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
        async with asyncio.timeout(STOPS_WITHIN_S):
            assert [await worker.process.wait() for worker in self._workers] == [0] * len(self._workers)


@dataclass
class _Worker:
    """One worker, life after life."""

    life: contextlib.AsyncExitStack
    process: Process
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@contextlib.asynccontextmanager
async def victims(server: EmbeddedServer, start_worker: StartWorker, num_workers: int) -> AsyncIterator[Victims]:
    """Start workers, numbered from 0, that may suffer together with `server`; all have ended when the block is left."""
    found = Victims(server, start_worker)
    try:
        await found.start(num_workers)
        yield found
        await found.stop()
    finally:
        await found.end()
