"""Time to the first token that the bus adds to an engine's own, with 1, 64 and 256 requests at once.

    python -m bench.latency [--engine synthetic|vllm] [--concurrency 1 64 256] [--rounds 5] [--json FILE]

The same engine in the program's own process, from adding a request to its first output, and behind the bus, from
`Client.generate` to its first chunk. Requests that come at once are asked for in one breath, and the time of each is
taken from the first of them: so what the client itself needs to send them off counts too. What is added is the
difference between the two ways of one round.

`synthetic` makes a step every 20 ms, and is mostly idle. `vllm` computes a tiny MoE on this machine's cores, which are
the bus's too: beside what the bus adds, its rows show what the engine and the bus take from each other.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from bench.latency_ways import IN_PROCESS, OVER_THE_BUS
from bench.real_engine import ask, on_real_engines
from bench.report import Report, add_arguments, in_turns, percentile, spreads
from bench.ways import Way, running

__all__: list[str] = []

SAMPLES = 100
"""Requests of each way and round, at least: a 99th percentile is of no fewer."""
TOKENS = 4
"""Of each request: those behind the first only see to it that it is not the last."""
REAL_WAYS = ("vllm-delta-uni", "rollbus-chunks")
"""In process, and over the bus; both with the model in the engine core's process."""


@asynccontextmanager
async def on_synthetic_engines() -> AsyncIterator[list[Way]]:
    """Start both ways."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running(name, "bench.latency_ways", name))
            for name in (IN_PROCESS, OVER_THE_BUS)
        ]


async def turn(way: Way, concurrency: int) -> dict[str, float]:
    """One round of one way: p50 and p99 of its times to the first token, in ms."""
    seconds: list[float] = []
    while len(seconds) < SAMPLES:
        answer = await ask(way, (concurrency, TOKENS))
        seconds += answer["first_s"]
    return {f"first_token_p{percent}_ms": 1000 * percentile(seconds, percent) for percent in (50, 99)}


async def measure(report: Report, engine: str, concurrencies: Sequence[int], rounds: int) -> None:
    """Three rows for each concurrency."""
    async with on_synthetic_engines() if engine == "synthetic" else on_real_engines(REAL_WAYS) as ways:
        for concurrency in concurrencies:
            for way in ways:
                await turn(way, concurrency)
            found: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
            for way in in_turns(rounds, ways):
                found[way.name].append(await turn(way, concurrency))
            own, bus = found.values()
            found["added"] = [{name: b[name] - a[name] for name in a} for a, b in zip(own, bus, strict=True)]
            for name, figures in found.items():
                report.add(way=name, concurrent=concurrency, **spreads(figures))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description="Time to the first token.")
    parser.add_argument("--engine", choices=("synthetic", "vllm"), default="synthetic")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("latency")
    asyncio.run(measure(report, args.engine, args.concurrency, args.rounds))
    report.finish(args.json)


if __name__ == "__main__":
    main()
