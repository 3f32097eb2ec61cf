"""The routing of long requests: milliseconds, memory and CPU time from the engine's array to a writable tensor.

    python -m bench.routing [--cases u1 u2] [--ways rollbus json orjson bare] [--rounds 5]
        [--seconds 5] [--flow 80] [--json FILE]

32,768 tokens with top-8 of 48 layers (u1, 12.6 MB) and of 61 (u2, 32 MB), over a real nats-server by rollbus, and by
HTTP as vLLM's server does it (`json`) and as it could (`orjson`), and by bare sockets through that nats-server
(`bare`). What the ways are: `bench.routing_ways`. Time is from when the engine hands its array over, on a clock that
processes share. A peak is by how much a process grows at most over what it took idle, in payloads; the engine's array
and the tensor are in it. CPU time is of the process, in ms for each payload. Every tensor is compared with what the
engine had.

Then how late the tokens of other requests are, without and while routing flows at `--flow` MB/s: `bench.routing_flow`.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from bench.memory import peak_bytes, reset_peak, resident_bytes
from bench.report import Report, Spread, add_arguments, in_turns, spreads
from bench.routing_engine import CASES, Case
from bench.routing_ways import WAYS
from bench.ways import Way, running
from rollbus.bus.nats.embedded import EmbeddedServer

__all__: list[str] = []


@dataclass(slots=True)
class Pair:
    """Both sides of a way, and what was measured of it."""

    way: str
    server: Way
    client: Way
    nats: EmbeddedServer
    milliseconds: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "client": []})
    peaks: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "client": [], "nats": []})

    @property
    def sides(self) -> dict[str, Way]:
        """By name."""
        return {"server": self.server, "client": self.client}

    async def measure_time(self) -> None:
        """One round, of which memory does not count: what was freed is taken again."""
        before = {name: (await side.ask("cpu"))["s"] for name, side in self.sides.items()}
        done_at = (await self.client.ask("get"))["at"]
        handed_at = (await self.server.ask("handed"))["at"]
        for name, side in self.sides.items():
            self.cpu_ms[name].append(1000 * ((await side.ask("cpu"))["s"] - before[name]))
        self.milliseconds.append(1000 * (done_at - handed_at))
        await self.check()

    async def measure_memory(self, case: Case) -> None:
        """One round, of which time does not count: all memory is fresh."""
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
        """Look at the tensor.

        Raises:
            RuntimeError: it is not what the engine had, or read-only.
        """
        if not (await self.client.ask("check"))["is_good"]:
            raise RuntimeError(f"{self.way}: the tensor is not the engine's array, or read-only")

    def add_to(self, report: Report, case_name: str) -> None:
        """One row of the table."""
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
    """Both sides of a way, warm."""
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
    """The rows of one case."""
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
    """How late tokens are without and with routing under way."""
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
    """Measure all that was asked for."""
    for case_name in args.cases:
        await compare(report, case_name, args.ways, args.rounds)
    if args.flow:
        await measure_flow(report, args.rounds, args.seconds, args.flow)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description="From an engine's array to a tensor.")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=5, help="of tokens in a round")
    parser.add_argument("--flow", type=float, default=80, help="MB/s of routing beside them; 0: do not look at tokens")
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("routing")
    asyncio.run(run(args, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
