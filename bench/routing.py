"""Measures the routed experts of long requests from the engine's array to a writable tensor: time, memory and CPU.

    python -m bench.routing [--cases u1 u2] [--ways rollbus json orjson bare] [--rounds 5] [--seconds 5] [--flow 80]
                            [--json FILE]

A request has 32,768 tokens with top-8 of 48 layers (u1, 12.6 MB) or of 61 layers (u2, 32 MB). The ways are rollbus over
a real nats-server, HTTP as in vLLM's server (`json`), a faster HTTP (`orjson`), and bare sockets through the same
nats-server (`bare`): see `bench.routing_ways`. The time starts when the engine outputs its array, on a clock that all
processes share. A peak is the maximum growth of a process over its idle size, in payloads. It includes the engine's
array and the tensor. CPU is the time of a process in ms per payload. Each tensor is compared with the engine's array.
Then the bench measures how late the tokens of other requests are, without routed experts and with routed experts at
`--flow` MB/s.

For that, the server is a worker whose engine makes a step every 5 ms. The client reads streams with one token per step.
It answers `measure SECONDS MB_PER_S` with the latencies, from the output of the engine to the loop over chunks, and
with the gaps between two tokens of a stream. Meanwhile it sends whole requests with 12.6 MB of routed experts each and
makes tensors of the results, on the same connection and in the same loop, at the given rate.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

import rollbus
from bench.processes import Way, answer, own_process
from bench.report import Report, peak_bytes, program, reset_peak, resident_bytes, take_turns
from bench.routing_ways import CASES, CLOCK, WAYS, Case, RoutedEngine, bus_request, clock_us, running_worker
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import Spread, in_turns, percentile, spreads
from rollbus.schemas.options import arg


@dataclass(slots=True)
class Pair:
    """Both sides of a way, and its figures."""

    way: str
    sides: Mapping[str, Way]
    """Server and client."""
    nats: EmbeddedServer
    milliseconds: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "client": []})
    peaks: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "client": [], "nats": []})

    async def measure_time(self) -> None:
        """Run one round for the time. Memory is not measured, because allocations reuse freed memory."""
        before = {name: (await side.ask("cpu"))["s"] for name, side in self.sides.items()}
        done_at = (await self.sides["client"].ask("get"))["at"]
        handed_at = (await self.sides["server"].ask("handed"))["at"]
        for name, side in self.sides.items():
            self.cpu_ms[name].append(1000 * ((await side.ask("cpu"))["s"] - before[name]))
        self.milliseconds.append(1000 * (done_at - handed_at))
        await self.check()

    async def measure_memory(self, case: Case) -> None:
        """Run one round for the memory. Time is not measured, because the system must provide all memory again."""
        for side in self.sides.values():
            await side.ask("idle")
        reset_peak(self.nats.pid)
        nats_bytes = resident_bytes(self.nats.pid)
        await self.sides["client"].ask("get")
        grown = {name: (await side.ask("grown"))["bytes"] for name, side in self.sides.items()}
        grown["nats"] = peak_bytes(self.nats.pid) - nats_bytes
        for name, values in self.peaks.items():
            values.append(grown[name] / case.num_bytes)
        await self.check()

    async def check(self) -> None:
        """Check the tensor.

        Raises:
            RuntimeError: the tensor differs from the engine's array or is read-only.
        """
        if not (await self.sides["client"].ask("check"))["is_good"]:
            raise RuntimeError(f"{self.way}: the tensor differs from the engine's array or is read-only")

    def add_to(self, report: Report, case_name: str) -> None:
        """Add a row to the table."""
        rates = [CASES[case_name].num_bytes / 1000 / taken for taken in self.milliseconds]
        report.add(
            rows=case_name,
            way=self.way,
            ms=Spread.of(self.milliseconds),
            mb_per_s=Spread.of(rates),
            **{f"{side}_cpu_ms": Spread.of(values) for side, values in self.cpu_ms.items()},
            **{f"{side}_peak": Spread.of(values) for side, values in self.peaks.items() if values},
        )


@asynccontextmanager
async def started(way: str, case_name: str, nats: EmbeddedServer) -> AsyncIterator[Pair]:
    """Start both sides of a way and warm them up."""
    async with own_process(f"{way} server", "routing_ways:side", "server", way, case_name, nats.url) as server:
        address = (await server.ask("address"))["address"]
        async with own_process(f"{way} client", "routing_ways:side", "client", way, case_name, address) as client:
            pair = Pair(way, {"server": server, "client": client}, nats)
            if way != "rollbus":
                del pair.peaks["nats"]
            await client.ask("warm")
            yield pair


async def compare(report: Report, case_name: str, ways: list[str], rounds: int) -> None:
    """Add the rows of one case."""
    case = CASES[case_name]
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(EmbeddedServer())
        pairs = [await stack.enter_async_context(started(way, case_name, nats)) for way in ways]
        for pair in in_turns(rounds, pairs):
            await pair.measure_memory(case)
        for pair in in_turns(rounds, pairs):
            await pair.measure_time()
        for pair in pairs:
            pair.add_to(report, case_name)


async def measure_flow(report: Report, rounds: int, seconds: float, mb_per_s: float) -> None:
    """Measure how late tokens are, without and with routed experts of other requests."""
    async with (
        EmbeddedServer() as nats,
        own_process("worker", "routing:run_server", nats.url),
        own_process("client", "routing:run_client", nats.url) as client,
    ):
        found = await take_turns(rounds, [0.0, mb_per_s], partial(client.ask, "measure", seconds))
    for rate, figures in found.items():
        way = "rollbus tokens, routing flows" if rate else "rollbus tokens alone"
        report.add(rows="u1", way=way, **spreads(figures))


async def run(args: argparse.Namespace, report: Report) -> None:
    """Run the selected measurements."""
    for case_name in args.cases:
        await compare(report, case_name, args.ways, args.rounds)
    if args.flow:
        await measure_flow(report, args.rounds, args.seconds, args.flow)


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
        await answer()


async def run_client(url: str) -> None:
    """Run the client."""
    async with rollbus.connect(url) as rb:
        await rb.fleet.wait_for_workers(timeout_s=30)

        async def answer_one(arguments: list[str]) -> object:
            return await measure(rb, float(arguments[1]), float(arguments[2]))

        await answer(answer_one)


if __name__ == "__main__":
    program(
        "routing",
        "Measure routed experts from array to tensor.",
        lambda args, report: asyncio.run(run(args, report)),
        arg("--cases", CASES, "", nargs="*", default=list(CASES)),
        arg("--ways", WAYS, "", nargs="+", default=list(WAYS)),
        arg("--seconds", None, "seconds of tokens in a round (default: %(default)s)", type=float, default=5),
        arg("--flow", None, "MB/s beside the tokens; 0: no tokens (default: %(default)s)", type=float, default=80),
    )
