"""Runs the ways that a bench compares, each in its own process, and asks them to measure.

A way is one variant of doing something. Its process runs a module that ends with `answer`. The module prints `ready`,
then answers each line on stdin with one line of JSON on stdout. It ends with its stdin, and so with the program that
started it.

This module is also the program of these processes: `python -m bench.processes MODULE:FUNCTION ARGS`.
"""

import asyncio
import importlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

import rollbus
from rollbus.bus.auth.credentials import Credentials, Role, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

MAX_LINE_BYTES = 2**24
"""Maximum bytes of an answer: the figures of a hundred thousand requests."""


class Way:
    """A way that runs in its own process.

    Args:
        name: name of the way in error messages.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @property
    def pid(self) -> int:
        """Process id. The process may have children."""
        return self._process.pid

    async def ask(self, *question: object) -> dict[str, Any]:
        """Send a command to the process and return its answer.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._process.stdin is None:
            raise RuntimeError("the process was started without pipes")
        self._process.stdin.write(f"{' '.join(map(str, question))}\n".encode())
        while not (line := await self.line()).startswith("{"):
            # Skip lines that engines print.
            pass
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def line(self) -> str:
        """Return the next line of its output.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"the process of {self.name} has exited")
        return line


@asynccontextmanager
async def running(name: str, module: str, *args: object) -> AsyncIterator[Way]:
    """Run `python -m MODULE ARGS` while the body runs, and wait until it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, args)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    try:
        way = Way(name, process)
        while (await way.line()).strip() != "ready":
            pass
        yield way
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def own_process(name: str, place: str, *args: object) -> AbstractAsyncContextManager[Way]:
    """Run the async function `module:function` of `bench` in its own process while the body runs, as `running` does."""
    return running(name, "bench.processes", place, *args)


async def no_answer(_words: list[str]) -> object:
    """Answer nothing, in a way that only runs."""
    return {}


async def answer(measure: Callable[[list[str]], Awaitable[object]] = no_answer) -> None:
    """Run a way: pass the arguments of each line on stdin to `measure`, and write its result, until stdin ends."""
    write("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        write(json.dumps(await measure(line.split())))


def write(line: str) -> None:
    """Write a line to stdout and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


FLEET = "default"
WORKER = "worker"

START_S = 180.0
"""Seconds until a worker with a real engine must serve."""


def bus_request(prompt: list[int], max_tokens: int, *, routing: bool | None = None) -> rollbus.GenerateRequest:
    """Return a request for exactly `max_tokens` tokens, greedy, with one log probability for each token."""
    sampling = rollbus.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=0)
    return rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling, return_routed_experts=routing)


@dataclass(frozen=True, slots=True)
class SecureBus:
    """A server with users, and the queue of one model."""

    server: EmbeddedServer
    trainers: Sequence[Credentials]
    worker: Path
    """Credentials of the only worker."""

    def worker_server(self) -> Server:
        """Return the address and login of the worker."""
        return Server(self.server.url, load_credentials(self.worker))


@asynccontextmanager
async def secure_bus(*trainers: str, model: str = "synthetic") -> AsyncIterator[SecureBus]:
    """Run a server with an admin, a worker and these trainers, all in accounts by role."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = [(FLEET, Role.TRAINER, name) for name in trainers]
        wanted += [(FLEET, Role.WORKER, WORKER), (FLEET, Role.ADMIN, "admin")]
        files = ensure_users(Path(folder), wanted)
        async with EmbeddedServer(users=[one.user for one in files]) as server:
            await provision(Server(server.url, load_credentials(files[-1].path)), FLEET, [model])
            yield SecureBus(server, [load_credentials(one.path) for one in files[: len(trainers)]], files[-2].path)


@asynccontextmanager
async def on_the_bus(*worker_args: str) -> AsyncIterator[rollbus.Client]:
    """Run a server and a worker as users start them. Yield a client."""
    async with (
        EmbeddedServer() as server,
        worker_process(server.url, *worker_args),
        rollbus.connect(server.url) as rb,
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_S)
        yield rb


def worker_process(
    url: str, *worker_args: str, env: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Run a worker while the body runs, with `env` added to its environment."""
    return program_process("rollbus.workers", "--nats", url, "--log-level", "warning", *worker_args, env=env)


@asynccontextmanager
async def program_process(
    module: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    stdout: int = asyncio.subprocess.DEVNULL,
    stderr: int | None = None,
    python: str = sys.executable,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `python -m MODULE ARGS` while the body runs, with `env` added to its environment. Then terminate it."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", module, *args), stdout=stdout, stderr=stderr, env=os.environ | (env or {})
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


LEASE_S = 30.0
"""Seconds of a lease. Many workers share one event loop. On a busy machine, a lease of the usual length would expire
while other workers run."""


@asynccontextmanager
async def many_workers(
    url: str, fleet: str, prefix: str, count: int, config: SyntheticConfig | None = None
) -> AsyncIterator[list[Worker]]:
    """Run `count` workers with the name `prefix` and a number while the body runs.

    Args:
        config: configuration of all their engines.
    """
    config = config or SyntheticConfig(max_num_seqs=4)
    workers = [
        Worker(
            WorkerConfig(
                nats_url=url, fleet=fleet, model="synthetic", worker_id=f"{prefix}{i}", lease_s=LEASE_S, listen_s=0.0
            ),
            SyntheticEngine(config),
        )
        for i in range(count)
    ]
    async with running_workers(*workers):
        yield workers


@asynccontextmanager
async def running_workers(*workers: Worker) -> AsyncIterator[None]:
    """Run workers in this process while the body runs."""
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(worker.run(), name="worker")
        try:
            yield
        finally:
            for worker in workers:
                worker.stop()


async def workers(url: str, fleet: str, prefix: str, count: str, engine_args: str = '{"max_num_seqs": 4}') -> None:
    """Run many workers until stdin ends. Prints `ready` when they have been started, not when they serve."""
    async with many_workers(url, fleet, prefix, int(count), SyntheticConfig.from_args(json.loads(engine_args))):
        await answer()


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    outcome = getattr(importlib.import_module(f"bench.{module}"), function)(*sys.argv[2:])
    if outcome is not None:
        uvloop.run(outcome)
