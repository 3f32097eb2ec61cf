"""Tokens a second, and CPU, of the transport alone: rollbus beside a good server of server-sent events.

    python -m bench.transport [--loads 64x1024 256x512] [--ways rollbus sse ...] [--rounds 5] [--json FILE]

A synthetic engine makes one token a step for each request, as fast as it can; every chunk and event has logprobs and
the weights' version. All ways have the same engine, in the process of their worker or server; their clients are
processes too, and all must give the same tokens and logprobs. A load of 64x1024 is 64 requests at once, of 1,024 tokens
each. The ways: `bench.transport_ways`; `engine` is the engine alone, with nothing behind it.

`tokens_at_a_time` is how many tokens came at once to whoever reads: with `complete_many`, all of a request. CPU is in
milliseconds per 1,000 tokens: of the worker (or server, with its engine), the client, nats-server, and all together.
`times_sse` is tokens a second, and `share_of_sse_cpu` the CPU of all, each by that of `sse` in the same round.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench.loads import Load, parse_loads, rate
from bench.report import Report, Spread, Value, add_arguments
from bench.transport_ways import WAYS
from bench.ways import Way, running

__all__: list[str] = []

PEER = "sse"
PROCESSES = ("worker", "client", "nats")
Answer = dict[str, Any]
"""A `bench.transport_ways.Round`."""


async def measure(names: Sequence[str], loads: Sequence[Load], rounds: int, report: Report) -> None:
    """Fill the report, in the order of loads and ways."""
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(running(name, "bench.transport_ways", name)) for name in names]
        for load in loads:
            await turn(ways, load, 0)
            turns = [await turn(ways, load, serial) for serial in range(1, rounds + 1)]
            for name in names:
                report.add(**row(name, load, turns))


async def turn(ways: Sequence[Way], load: Load, serial: int) -> dict[str, Answer]:
    """One measurement of each way.

    Raises:
        RuntimeError: a way has ended, or gave too few tokens, or others than the rest.
    """
    answers = {way.name: await way.ask(*load, serial) for way in ways}
    results = {(one["tokens"], one["token_sum"], one["logprob_sum"]) for one in answers.values()}
    if len(results) != 1 or next(iter(results))[0] != load[0] * load[1]:
        raise RuntimeError(f"not {load[0]}x{load[1]} tokens, the same by all ways: {answers}")
    return answers


def row(name: str, load: Load, turns: Sequence[dict[str, Answer]]) -> dict[str, Value]:
    """What the rounds gave of one way."""
    own = [answers[name] for answers in turns]
    columns: dict[str, Value] = {
        "way": name,
        "load": f"{load[0]}x{load[1]}",
        "tokens_per_s": Spread.of([rate(one) for one in own]),
    }
    for process in PROCESSES:
        if process in own[0]["cpu_s"]:
            columns[f"{process}_cpu_ms"] = Spread.of([1e6 * one["cpu_s"][process] / one["tokens"] for one in own])
    columns["all_cpu_ms"] = Spread.of([cpu_ms(one) for one in own])
    if own[0]["chunks"]:
        columns["tokens_at_a_time"] = Spread.of([one["tokens"] / one["chunks"] for one in own])
    if name != PEER and PEER in turns[0]:
        columns["times_sse"] = Spread.of([rate(answers[name]) / rate(answers[PEER]) for answers in turns])
        columns["share_of_sse_cpu"] = Spread.of([cpu_ms(answers[name]) / cpu_ms(answers[PEER]) for answers in turns])
    return columns


def cpu_ms(one: Answer) -> float:
    """Of all processes, per 1,000 tokens."""
    return float(1e6 * sum(one["cpu_s"].values()) / one["tokens"])


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description="The transport alone.")
    parser.add_argument("--loads", nargs="+", default=["64x1024", "256x512"], metavar="REQUESTSxTOKENS")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("transport")
    asyncio.run(measure(args.ways, parse_loads(args.loads), args.rounds, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
