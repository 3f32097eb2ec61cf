"""Measures tokens per second of a real vLLM engine, with logprobs and routed experts, in several ways.

    python -m bench.real_engine [--loads 64x64 256x128] [--rounds 5] [--ways rollbus vllm-http ...] [--json FILE]

The ways are rollbus, vLLM's own HTTP server, and vLLM in process: see `bench.real_engine_ways`. Each way has its own
engine with the same tiny MoE. All engines run at the same time. The rounds of the ways take turns and begin with a
different way each time. So a slow phase of the machine affects all ways, and no way always follows the same other way.

A load of 64x64 is 64 requests at once, of 64 tokens each. `rows_share` is the number of received rows divided by the
number that the row rule requires. CPU is the time of all processes of a way with its engine, per 1,000 tokens. For
rollbus it is also shown for the client, nats-server, and the worker without its engine core. `times_http` and
`times_in_process` are tokens per second divided by those of `vllm-http` and `vllm-delta` in the same round.
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.cpu import cpu_s
from bench.loads import Load, parse_loads, rate
from bench.real_engine_ways import PROMPT_TOKENS, WAYS
from bench.report import Report, add_arguments
from bench.ways import Way, running
from rollbus.frontend.cli.tables import Spread, Value
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

MODEL = Path.home() / ".cache" / "rollbus" / "bench-tiny-moe"
PEERS = {"times_http": "vllm-http", "times_in_process": "vllm-delta"}
SETTLE_S = 0.3


@asynccontextmanager
async def on_real_engines(names: Sequence[str]) -> AsyncIterator[list[Way]]:
    """Start these ways, each with an engine."""
    model = make_tiny_moe(MODEL)
    async with AsyncExitStack() as stack:
        # Start the engines one after the other. Engines that start at the same time count the same free memory.
        yield [await stack.enter_async_context(running(name, "bench.real_engine_ways", name, model)) for name in names]


async def ask(way: Way, load: Load) -> dict[str, Any]:
    """Run one round.

    Raises:
        RuntimeError: the process has ended, or fewer tokens arrived than were requested.
    """
    answer = await way.ask(*load)
    if answer["tokens"] != load[0] * load[1]:
        raise RuntimeError(f"{way.name}: {answer['tokens']} tokens of {load[0] * load[1]}")
    return answer


async def measure(report: Report, names: Sequence[str], loads: Sequence[Load], rounds: int) -> None:
    """Measure all loads with all ways."""
    async with on_real_engines(names) as ways:
        for load in loads:
            await turn(ways, load, 0)
            turns = [await turn(ways, load, number) for number in range(rounds)]
            for name in names:
                report.add(**row(name, load, turns))


async def turn(ways: Sequence[Way], load: Load, number: int) -> dict[str, Any]:
    """Run one round of each way. Each round begins with a different way."""
    first = number % len(ways)
    answers = {}
    for way in [*ways[first:], *ways[:first]]:
        # Wait until the engine of the previous way has finished the work after its last token.
        await asyncio.sleep(SETTLE_S)
        cpu_before = cpu_of(way.pid)
        answers[way.name] = await ask(way, load)
        answers[way.name]["cpu_s"] = {name: spent - cpu_before[name] for name, spent in cpu_of(way.pid).items()}
    return answers


def cpu_of(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process and of all processes that it started, by their kind."""
    process = psutil.Process(pid)
    found = defaultdict[str, float](float, client=cpu_s(pid))
    for one in process.children(recursive=True):
        child = "nats" if one.name().startswith("nats") else "worker" if one.ppid() == pid else "core"
        found[child] += cpu_s(one.pid)
    return found


def row(name: str, load: Load, turns: Sequence[dict[str, Any]]) -> dict[str, Value]:
    """Return the row of one way with the figures of all rounds."""
    num_requests, num_tokens = load
    own = [answers[name] for answers in turns]
    columns: dict[str, Value] = {
        "way": name,
        "load": f"{num_requests}x{num_tokens}",
        "tokens_per_s": Spread.of([rate(one) for one in own]),
        "cpu_ms": Spread.of([1e6 * sum(one["cpu_s"].values()) / one["tokens"] for one in own]),
        "rows_share": min(one["rows"] for one in own) / (num_requests * (PROMPT_TOKENS + num_tokens - 1)),
    }
    if name.startswith("rollbus"):
        for process in ("client", "nats", "worker"):
            columns[f"{process}_cpu_ms"] = Spread.of([1e6 * one["cpu_s"][process] / one["tokens"] for one in own])
    for column, peer in PEERS.items():
        if peer != name and peer in turns[0]:
            columns[column] = Spread.of([rate(answers[name]) / rate(answers[peer]) for answers in turns])
    return columns


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_engine", description="Measure tokens per second of a real engine."
    )
    parser.add_argument("--loads", nargs="+", default=["64x64", "256x128"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("real_engine")
    asyncio.run(measure(report, args.ways, parse_loads(args.loads), args.rounds))
    report.finish(args.json)


if __name__ == "__main__":
    main()
