"""Tokens a second from a real vLLM engine, with logprobs and routing: rollbus, vLLM's own HTTP server, vLLM in process.

    python -m bench.real_engine [--loads 64x64 256x128] [--rounds 5] [--ways rollbus vllm-http ...] [--json FILE]

Each way has an engine of its own on the same tiny MoE, all are running, and their rounds take turns, in another order
each time: whatever slows this machine down slows all of them, and none always follows the same other one. What the ways
are: `bench.real_engine_ways`. A load of 64x64 is 64 requests at once, of 64 tokens each. Rows are what came of the
routing, of those that the row rule says. CPU is of all processes of a way, its engine's too, per 1,000 tokens; of
rollbus also that of the client, of nats-server and of the worker without its engine core.
`times_http` and `times_in_process` are tokens a second by those of `vllm-http` and `vllm-delta` in the same round.
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
from bench.report import Report, Spread, Value, add_arguments
from bench.ways import Way, running
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

__all__ = ["ask", "on_real_engines"]

MODEL = Path.home() / ".cache" / "rollbus" / "bench-tiny-moe"
PEERS = {"times_http": "vllm-http", "times_in_process": "vllm-delta"}
SETTLE_S = 0.3


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
            await turn(ways, load, 0)
            turns = [await turn(ways, load, number) for number in range(rounds)]
            for name in names:
                report.add(**row(name, load, turns))


async def turn(ways: Sequence[Way], load: Load, number: int) -> dict[str, Any]:
    """One round of each way; they begin with another one each time."""
    first = number % len(ways)
    answers = {}
    for way in [*ways[first:], *ways[:first]]:
        # What an engine still does behind its last token is its own, and not the next one's.
        await asyncio.sleep(SETTLE_S)
        cpu_before = cpu_of(way.pid)
        answers[way.name] = await ask(way, load)
        answers[way.name]["cpu_s"] = {name: spent - cpu_before[name] for name, spent in cpu_of(way.pid).items()}
    return answers


def cpu_of(pid: int) -> dict[str, float]:
    """Seconds of a process and of all that it has started, by what they are."""
    process = psutil.Process(pid)
    found = defaultdict[str, float](float, client=cpu_s(pid))
    for one in process.children(recursive=True):
        child = "nats" if one.name().startswith("nats") else "worker" if one.ppid() == pid else "core"
        found[child] += cpu_s(one.pid)
    return found


def row(name: str, load: Load, turns: Sequence[dict[str, Any]]) -> dict[str, Value]:
    """What the rounds gave of one way."""
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
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_engine", description="Tokens a second of a real engine."
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
