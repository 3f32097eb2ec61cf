"""Tokens a second from a real vLLM engine, with logprobs and routing: rollbus, vLLM's own HTTP server, vLLM in process.

    python -m bench.real_engine [--loads 64x64 256x128] [--rounds 5] [--ways rollbus vllm-http ...] [--json FILE]

Each way has an engine of its own on the same tiny MoE, all are running, and their rounds take turns: whatever slows
this machine down slows all of them. What the ways are: `bench.real_engine_ways`. A load of 64x64 is 64 requests at
once, of 64 tokens each. Rows are what came of the routing, of those that the row rule says.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.real_engine_ways import PROMPT_TOKENS, WAYS
from bench.report import Report, Spread, add_arguments
from bench.ways import Way, running
from workers.engines.vllm.tiny_moe import make_tiny_moe

__all__ = ["ask", "on_real_engines"]

MODEL = Path.home() / ".cache" / "rollbus" / "bench-tiny-moe"
Load = tuple[int, int]
"""Requests at once, and tokens of each."""


@asynccontextmanager
async def on_real_engines(names: Sequence[str]) -> AsyncIterator[list[Way]]:
    """Start these ways, each with an engine."""
    model = make_tiny_moe(MODEL)
    async with AsyncExitStack() as stack:
        # One after the other: engines that start at once look at the same free memory.
        yield [await stack.enter_async_context(running(name, "bench.real_engine_ways", name, model)) for name in names]


async def ask(way: Way, load: Load) -> dict[str, Any]:
    """One round.

    Raises:
        RuntimeError: the process has ended, or fewer tokens came than were asked for.
    """
    answer = await way.ask(*load)
    if answer["tokens"] != load[0] * load[1]:
        raise RuntimeError(f"{way.name}: {answer['tokens']} tokens of {load[0] * load[1]}")
    return answer


async def measure(report: Report, names: Sequence[str], loads: Sequence[Load], rounds: int) -> None:
    """All loads with all ways."""
    async with on_real_engines(names) as ways:
        for load in loads:
            for way in ways:
                await ask(way, load)
            turns = [[await ask(way, load) for way in ways] for _ in range(rounds)]
            for i, way in enumerate(ways):
                add_row(report, way.name, load, [turn[i] for turn in turns])


def add_row(report: Report, name: str, load: Load, rounds: Sequence[dict[str, Any]]) -> None:
    """One row of the table."""
    num_requests, num_tokens = load
    report.add(
        way=name,
        requests=num_requests,
        tokens=num_tokens,
        tokens_per_s=Spread.of([one["tokens"] / one["seconds"] for one in rounds]),
        rows_share=min(one["rows"] for one in rounds) / (num_requests * (PROMPT_TOKENS + num_tokens - 1)),
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_engine", description="Tokens a second of a real engine."
    )
    parser.add_argument("--loads", nargs="+", default=["64x64", "256x128"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add_arguments(parser)
    args = parser.parse_args()
    loads = [(int(load.split("x")[0]), int(load.split("x")[1])) for load in args.loads]
    report = Report("real_engine")
    asyncio.run(measure(report, args.ways, loads, args.rounds))
    report.finish(args.json)


if __name__ == "__main__":
    main()
