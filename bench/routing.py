"""Measures the routed experts of long requests from the engine's array to a writable tensor: time, memory and CPU.

    python -m bench.routing [--cases u1 u2] [--ways rollbus json orjson bare] [--rounds 5] [--seconds 5] [--flow 80]
                            [--json FILE]

A request has 32,768 tokens with top-8 of 48 layers (u1, 12.6 MB) or of 61 layers (u2, 32 MB). The ways are rollbus over
a real nats-server, HTTP as in vLLM's server (`json`), a faster HTTP (`orjson`), and bare sockets through the same
nats-server (`bare`): see `bench.routing_ways`. The time starts when the engine outputs its array, on a clock that all
processes share. A peak is the maximum growth of a process over its idle size, in payloads. It includes the engine's
array and the tensor. CPU is the time of a process in ms per payload. Each tensor is compared with the engine's array.
Then the bench measures how late the tokens of other requests are, without routed experts and with routed experts at
`--flow` MB/s: `bench.routing_flow`.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from bench.memory import peak_bytes, reset_peak, resident_bytes
from bench.report import Report, add_arguments
from bench.routing_engine import CASES, Case
from bench.routing_ways import WAYS
from bench.ways import Way, running
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import Spread, in_turns, spreads


@dataclass(slots=True)
class Pair:
    """Both sides of a way, and its figures."""

    way: str
    server: Way
    client: Way
    nats: EmbeddedServer
    milliseconds: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "client": []})
    peaks: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "client": [], "nats": []})

    @property
    def sides(self) -> dict[str, Way]:
        """Both sides, by name."""
        return {"server": self.server, "client": self.client}

    async def measure_time(self) -> None:
        """Run one round for the time. Memory is not measured, because allocations reuse freed memory."""
        before = {name: (await side.ask("cpu"))["s"] for name, side in self.sides.items()}
        done_at = (await self.client.ask("get"))["at"]
        handed_at = (await self.server.ask("handed"))["at"]
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
        await self.client.ask("get")
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
        if not (await self.client.ask("check"))["is_good"]:
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
    module = "bench.routing_ways"
    async with running(f"{way} server", module, "server", way, case_name, nats.url) as server:
        address = (await server.ask("address"))["address"]
        async with running(f"{way} client", module, "client", way, case_name, address) as client:
            pair = Pair(way, server, client, nats)
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
    module = "bench.routing_flow"
    async with (
        EmbeddedServer() as nats,
        running("worker", module, "server", nats.url),
        running("client", module, "client", nats.url) as client,
    ):
        found: dict[float, list[dict[str, float]]] = {0.0: [], mb_per_s: []}
        for rate in in_turns(rounds, found):
            found[rate].append(await client.ask("measure", seconds, rate))
    for rate, figures in found.items():
        way = "rollbus tokens, routing flows" if rate else "rollbus tokens alone"
        report.add(rows="u1", way=way, **spreads(figures))


async def run(args: argparse.Namespace, report: Report) -> None:
    """Run the selected measurements."""
    for case_name in args.cases:
        await compare(report, case_name, args.ways, args.rounds)
    if args.flow:
        await measure_flow(report, args.rounds, args.seconds, args.flow)


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing", description="Measure routed experts from array to tensor."
    )
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=5, help="seconds of tokens in a round (default: %(default)s)")
    parser.add_argument(
        "--flow",
        type=float,
        default=80,
        help="MB/s of routed experts beside the tokens; 0: no tokens (default: %(default)s)",
    )
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("routing")
    asyncio.run(run(args, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
