"""The ways over the bus: what benches start, and what they ask for."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer

__all__ = ["START_S", "bus_request", "on_the_bus"]

START_S = 180.0
"""For a worker with a real engine to serve."""


def bus_request(prompt: list[int], max_tokens: int, *, routing: bool | None = None) -> rollbus.GenerateRequest:
    """Ask for exactly so many tokens, greedy, with one logprob for each."""
    sampling = rollbus.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=0)
    return rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling, return_routed_experts=routing)


@asynccontextmanager
async def on_the_bus(*worker_args: str) -> AsyncIterator[tuple[rollbus.Client, Mapping[str, int]]]:
    """A server and a worker as users start them, and a client; with the pids of the former."""
    async with EmbeddedServer() as server:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollbus.workers", "--nats", server.url, "--log-level", "warning", *worker_args),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            async with rollbus.connect(server.url) as rb:
                await rb.fleet.wait_for_workers(timeout_s=START_S)
                yield rb, {"worker": worker.pid, "nats": server.pid}
        finally:
            worker.terminate()
            await worker.wait()
