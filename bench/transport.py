"""Measures tokens per second and CPU of the transport only: rollbus, and a good server of server-sent events.

    python -m bench.transport [--loads 64x1024 256x512] [--ways rollbus sse ...] [--rounds 5] [--json FILE]

A synthetic engine makes one token per step for each request, at its full speed. Each chunk and event has logprobs and
the weight version. All ways have the same engine in the process of their worker or server. Their clients are separate
processes. All ways must give the same tokens and logprobs. A load of 64x1024 is 64 requests at once, of 1,024 tokens
each.

The ways are in `bench.transport_ways`. `engine` is the engine without a transport. `tokens_at_a_time` is the number of
tokens that the reader receives at once; with `complete_many` these are all tokens of a request. CPU is in milliseconds
per 1,000 tokens, for the worker (or the server with its engine), the client, nats-server, and all together. `times_sse`
is tokens per second, and `share_of_sse_cpu` the CPU of all processes, each divided by the figure of `sse` in the same
round.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench.loads import Load, parse_loads, rate
from bench.report import Report, add_arguments
from bench.transport_ways import WAYS
from bench.ways import Way, running
from rollbus.frontend.cli.tables import Spread, Value

PEER = "sse"
PROCESSES = ("worker", "client", "nats")
Answer = dict[str, Any]
"""The fields of a `bench.transport_ways.Round`."""


async def measure(names: Sequence[str], loads: Sequence[Load], rounds: int, report: Report) -> None:
    """Add the rows to the report, in the order of loads and ways."""
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(running(name, "bench.transport_ways", name)) for name in names]
        for load in loads:
            await turn(ways, load, 0)
            turns = [await turn(ways, load, serial) for serial in range(1, rounds + 1)]
            for name in names:
                report.add(**row(name, load, turns))


async def turn(ways: Sequence[Way], load: Load, serial: int) -> dict[str, Answer]:
    """Measure each way once.

    Raises:
        RuntimeError: a way has ended, or it gave too few tokens, or its tokens differ from those of the other ways.
    """
    answers = {way.name: await way.ask(*load, serial) for way in ways}
    results = {(one["tokens"], one["token_sum"], one["logprob_sum"]) for one in answers.values()}
    if len(results) != 1 or next(iter(results))[0] != load[0] * load[1]:
        raise RuntimeError(f"the ways returned different tokens for the load {load[0]}x{load[1]}: {answers}")
    return answers


def row(name: str, load: Load, turns: Sequence[dict[str, Answer]]) -> dict[str, Value]:
    """Return the row of one way with the figures of all rounds."""
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
    """Return the CPU milliseconds of all processes per 1,000 tokens."""
    return float(1e6 * sum(one["cpu_s"].values()) / one["tokens"])


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description="Measure only the transport.")
    parser.add_argument("--loads", nargs="+", default=["64x1024", "256x512"], metavar="REQUESTSxTOKENS")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("transport")
    asyncio.run(measure(args.ways, parse_loads(args.loads), args.rounds, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
