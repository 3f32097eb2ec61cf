"""Measures the time to the first token that the bus adds to the time of an engine, with 1, 64 and 256 requests at once.

    python -m bench.latency [--engine synthetic|vllm] [--concurrency 1 64 256] [--rounds 5] [--json FILE]

The bench compares two ways. In process, the time is from the addition of a request to the engine until its first
output. Behind the bus, it is from `Client.generate` until the first chunk. Requests that are open at once are sent
together, and all times start with the first of them, so the time that the client needs to send them counts too. The
added time is the difference between the two ways in one round. `synthetic` makes a step every 20 ms and is mostly idle.
`vllm` computes a tiny MoE on the cores of this machine, which the bus needs too. So its rows also show how engine and
bus slow each other down.

The ways are those of `bench.ways`.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec

from bench.processes import Way, bus_request, own_process
from bench.real_engine import on_real_engines
from bench.report import Report, program, take_turns
from bench.ways import Result, Run, ask, at_once, rollbus_chunks, serve
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.frontend.cli.tables import percentile, spreads
from rollbus.schemas.options import arg
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

ENGINE_CONFIG = SyntheticConfig(step_s=0.02, max_num_seqs=256, num_experts=0)
"""Steps of the length of a real engine. They need so little CPU that a core has time to spare with 256 requests."""


@asynccontextmanager
async def in_process() -> AsyncIterator[Run]:
    """Run the engine in this process. A queue for each request receives the output of the steps."""
    engine = SyntheticEngine(ENGINE_CONFIG)
    # The queue of a request holds at most the tokens that the request may generate.
    queues: dict[str, asyncio.Queue[RequestStep]] = {}
    keys = map(str, itertools.count())

    async def hand_out() -> None:
        async for steps in engine.steps():
            for step in split(steps):
                queues[step.key].put_nowait(step)

    async def one(prompt: list[int], max_tokens: int, result: Result) -> None:
        key = next(keys)
        queue = queues[key] = asyncio.Queue(max_tokens)
        await engine.add(key, bus_request(prompt, max_tokens))
        while True:
            step = await queue.get()
            result.add(step.token_ids.tolist(), [])
            if step.finish_reason is not None:
                del queues[key]
                return

    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        handing_out = tasks.create_task(hand_out(), name="hand out")
        yield at_once(one)
        handing_out.cancel()


def over_the_bus() -> AbstractAsyncContextManager[Run]:
    """Run a worker with the engine in one process, a server in another, and the client in this process."""
    args = json.dumps(msgspec.to_builtins(ENGINE_CONFIG))
    return rollbus_chunks("--engine", "synthetic", "--engine-args", args)


async def way(name: str) -> None:
    """Serve one way in this process."""
    await serve(in_process() if name == "in-process" else over_the_bus())


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
        names = ("in-process", "rollbus")
        yield [await stack.enter_async_context(own_process(name, "latency:way", name)) for name in names]


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
            taken = await take_turns(rounds, ways, partial(turn, concurrency=concurrency))
            own, bus = taken.values()
            added = [{name: b[name] - a[name] for name in a} for a, b in zip(own, bus, strict=True)]
            for name, figures in [*((way.name, rounds) for way, rounds in taken.items()), ("added", added)]:
                report.add(way=name, concurrent=concurrency, **spreads(figures))


if __name__ == "__main__":
    program(
        "latency",
        "Measure the time to the first token.",
        lambda args, report: asyncio.run(measure(report, args.engine, args.concurrency, args.rounds)),
        arg("--engine", ("synthetic", "vllm"), "", default="synthetic"),
        arg("--concurrency", None, "", type=int, nargs="+", default=[1, 64, 256]),
    )
