"""Servers, workers and requests of the benches that measure ways over the bus."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import rollbus
from rollbus.bus.auth.credentials import Credentials, Role, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server

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
async def on_the_bus(*worker_args: str) -> AsyncIterator[tuple[rollbus.Client, Mapping[str, int]]]:
    """Run a server and a worker as users start them. Yield a client and the process ids of server and worker."""
    async with (
        EmbeddedServer() as server,
        worker_process(server.url, *worker_args) as worker,
        rollbus.connect(server.url) as rb,
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_S)
        yield rb, {"worker": worker.pid, "nats": server.pid}


@asynccontextmanager
async def worker_process(
    url: str, *worker_args: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a worker while the body runs.

    Args:
        env: variables that are added to its environment.
    """
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollbus.workers", "--nats", url, "--log-level", "warning", *worker_args),
        stdout=asyncio.subprocess.DEVNULL,
        env=os.environ | (env or {}),
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.terminate()
        await worker.wait()
