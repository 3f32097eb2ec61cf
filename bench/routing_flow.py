"""Measures how late tokens are while routed experts of other requests flow, in two processes of `bench.routing`.

    python -m bench.routing_flow server|client URL

The server is a worker whose engine makes a step every 5 ms. The client reads streams with one token per step. It
answers `measure SECONDS MB_PER_S` with the latencies, from the output of the engine to the loop over chunks, and with
the gaps between two tokens of a stream. Meanwhile it sends whole requests with 12.6 MB of routed experts each and makes
tensors of the results, on the same connection and in the same loop, at the given rate.
"""

import asyncio
import sys
import time
from dataclasses import dataclass, field

import torch
import uvloop

import rollbus
from bench.routing_engine import CASES, CLOCK, RoutedEngine, clock_us
from bench.routing_ways import bus_request, running_worker
from bench.ways import answer
from rollbus.frontend.cli.tables import percentile

CASE = CASES["u1"]
STEP_S = 0.005
NUM_STREAMS = 16
NUM_PROMPT = 16
SETTLE_TOKENS = 20
"""Tokens of each stream that come before its figures count."""
MAX_IN_FLIGHT = 8
"""Maximum number of requests with routed experts. So a path that is too slow delivers less and does not accumulate
requests."""


@dataclass(slots=True)
class Figures:
    """Times in milliseconds, and the bytes of the tensors."""

    latencies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_bytes: int = 0


async def read_stream(rb: rollbus.Client, num_tokens: int, figures: Figures) -> None:
    """Read the tokens of a request as they arrive."""
    count, last = 0, 0
    async for chunk in rb.generate(bus_request(NUM_PROMPT, num_tokens)):
        now = clock_us()
        if count > SETTLE_TOKENS:
            figures.latencies += [(now - token) % CLOCK / 1000 for token in chunk.token_ids.tolist()]
            figures.gaps.append((now - last) % CLOCK / 1000)
        count += chunk.num_tokens
        last = now


async def flow(rb: rollbus.Client, mb_per_s: float, figures: Figures) -> None:
    """Request routed experts at this rate until cancelled."""
    turns = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def one() -> None:
        try:
            generation = await rb.complete(bus_request(CASE.num_tokens))
            if generation.routed_experts is None or len(generation.routed_experts) != CASE.num_tokens:
                raise RuntimeError(f"the result has wrong routed experts: {generation}")
            figures.num_bytes += torch.from_numpy(generation.routed_experts).nbytes
        finally:
            turns.release()

    async with asyncio.TaskGroup() as tasks:
        next_at = time.monotonic()
        while True:
            await turns.acquire()
            tasks.create_task(one())
            next_at = max(next_at + CASE.num_bytes / (mb_per_s * 1e6), time.monotonic())
            await asyncio.sleep(next_at - time.monotonic())


async def measure(rb: rollbus.Client, seconds: float, mb_per_s: float) -> dict[str, float]:
    """Return the figures of all streams together."""
    figures = Figures()
    async with asyncio.TaskGroup() as tasks:
        flowing = tasks.create_task(flow(rb, mb_per_s, figures)) if mb_per_s else None
        started = time.monotonic()
        async with asyncio.TaskGroup() as streams:
            for _ in range(NUM_STREAMS):
                streams.create_task(read_stream(rb, SETTLE_TOKENS + round(seconds / STEP_S), figures))
        num_bytes, taken_s = figures.num_bytes, time.monotonic() - started
        if flowing is not None:
            flowing.cancel()
    return {
        "p50_ms": percentile(figures.latencies, 50),
        "p99_ms": percentile(figures.latencies, 99),
        "gap_p50_ms": percentile(figures.gaps, 50),
        "gap_p99_ms": percentile(figures.gaps, 99),
        "flow_mb_per_s": num_bytes / 1e6 / taken_s,
    }


async def run_server(url: str) -> None:
    """Run the worker."""
    async with running_worker(RoutedEngine(CASE, step_s=STEP_S, is_fresh=False), url):

        async def refuse(arguments: list[str]) -> object:
            raise ValueError(f"unknown command: {arguments}")

        await answer(refuse)


async def run_client(url: str) -> None:
    """Run the client."""
    async with rollbus.connect(url) as rb:
        await rb.fleet.wait_for_workers(timeout_s=30)

        async def answer_one(arguments: list[str]) -> object:
            return await measure(rb, float(arguments[1]), float(arguments[2]))

        await answer(answer_one)


if __name__ == "__main__":
    side, address = sys.argv[1:]
    uvloop.run((run_server if side == "server" else run_client)(address))
