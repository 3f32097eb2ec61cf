"""Measures the time to the first token that the bus adds to the time of an engine, with 1, 64 and 256 requests at once.

    python -m bench.latency [--engine synthetic|vllm] [--concurrency 1 64 256] [--rounds 5] [--json FILE]

The bench compares two ways. In process, the time is from the addition of a request to the engine until its first
output. Behind the bus, it is from `Client.generate` until the first chunk. Requests that are open at once are sent
together, and all times start with the first of them, so the time that the client needs to send them counts too. The
added time is the difference between the two ways in one round. `synthetic` makes a step every 20 ms and is mostly idle.
`vllm` computes a tiny MoE on the cores of this machine, which the bus needs too. So its rows also show how engine and
bus slow each other down.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from bench.latency_ways import IN_PROCESS, OVER_THE_BUS
from bench.real_engine import ask, on_real_engines
from bench.report import Report, add_arguments
from bench.ways import Way, running
from rollbus.frontend.cli.tables import in_turns, percentile, spreads

SAMPLES = 100
"""Minimum requests of each way and round. The 99th percentile needs this number."""
TOKENS = 4
"""Tokens of each request. With more than one token, the first token is not also the last."""
REAL_WAYS = ("vllm-delta-uni", "rollbus-chunks")
"""The ways in process and over the bus. Both run the model in the process of the engine core."""


@asynccontextmanager
async def on_synthetic_engines() -> AsyncIterator[list[Way]]:
    """Start both ways."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running(name, "bench.latency_ways", name))
            for name in (IN_PROCESS, OVER_THE_BUS)
        ]


async def turn(way: Way, concurrency: int) -> dict[str, float]:
    """Run one round of one way. Return p50 and p99 of its times to the first token in ms."""
    seconds: list[float] = []
    while len(seconds) < SAMPLES:
        answer = await ask(way, (concurrency, TOKENS))
        seconds += answer["first_s"]
    return {f"first_token_p{percent}_ms": 1000 * percentile(seconds, percent) for percent in (50, 99)}


async def measure(report: Report, engine: str, concurrencies: Sequence[int], rounds: int) -> None:
    """Add three rows for each concurrency."""
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
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description="Measure the time to the first token.")
    parser.add_argument("--engine", choices=("synthetic", "vllm"), default="synthetic")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("latency")
    asyncio.run(measure(report, args.engine, args.concurrency, args.rounds))
    report.finish(args.json)


if __name__ == "__main__":
    main()
