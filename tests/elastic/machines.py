"""The processes of one kind in a run: each has a supervisor that starts it again after it exits, until it leaves."""

import asyncio
import contextlib
import itertools
import os
import signal
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import rollbus
from rollbus.schemas.presence import WorkerPresence, WorkerState
from tests.support.waits import until_true

Start = Callable[[str], AbstractAsyncContextManager[Process]]
AGAIN_S = 0.2
"""Seconds before a process is started again, as the delay of a supervisor."""


class Machines:
    """The workers that run now, or processes of another kind. Names are never used again after one has left.

    Args:
        start: starts a process of the worker with this name.
        prefix: first character of the names.
    """

    def __init__(self, rb: rollbus.Client, tasks: asyncio.TaskGroup, start: Start, prefix: str = "w") -> None:
        self.exits: Counter[int] = Counter()
        """Number of ended processes by exit code."""
        self._rb = rb
        self._tasks = tasks
        self._start = start
        self._names = (f"{prefix}{number}" for number in itertools.count())
        self._processes: dict[str, Process] = {}
        self._leaving: dict[str, signal.Signals] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    @property
    def names(self) -> list[str]:
        """Workers that have not left."""
        return sorted(self._keepers.keys() - self._leaving.keys())

    @property
    def serving(self) -> dict[str, WorkerPresence]:
        """Workers whose current process serves, by name."""
        return {
            worker.worker: worker
            for worker in self._rb.fleet.workers
            if worker.state is WorkerState.SERVING and self.pids.get(worker.worker) == worker.pid
        }

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running processes, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    def join(self) -> str:
        """Start a worker with a new name, and return its name."""
        name = next(self._names)
        self._keepers[name] = self._tasks.create_task(self._keep(name), name=f"elastic.keep.{name}")
        return name

    async def leave(self, name: str, number: signal.Signals) -> None:
        """End a worker for good, and wait until its process has ended."""
        self._leaving[name] = number
        self.send(name, number)
        await self._keepers.pop(name)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the current process of a worker, if it runs."""
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    async def until_all_serve(self, version: int | None = None) -> None:
        """Wait until every worker serves, and has this version of the weights."""

        def is_whole() -> bool:
            found = self.serving
            return found.keys() == {*self.names} and all(
                version in (None, worker.weight_version) for worker in found.values()
            )

        await until_true(is_whole)

    async def stop(self) -> None:
        """Stop all workers in order, and check that each exits with 0."""
        self.exits.clear()
        names = self.names
        self._leaving.update(dict.fromkeys(names, signal.SIGTERM))
        for name in names:
            self.send(name, signal.SIGTERM)
        for name in names:
            await self._keepers.pop(name)
        assert self.exits == {0: len(names)}

    async def _keep(self, name: str) -> None:
        while name not in self._leaving:
            async with self._start(name) as process:
                self._processes[name] = process
                if name in self._leaving:
                    # The signal came before the process.
                    self.send(name, self._leaving[name])
                code = await process.wait()
            self.exits[code] += 1
            # A process that has just begun dies of SIGTERM.
            assert code in (0, -signal.SIGKILL, -signal.SIGTERM), f"{name} ended with exit code {code}"
            if name not in self._leaving:
                await asyncio.sleep(AGAIN_S)
        self._processes.pop(name, None)
