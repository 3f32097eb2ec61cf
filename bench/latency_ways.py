"""The two ways from a synthetic engine to a program that `bench.latency` compares, each in a process of its own.

    python -m bench.latency_ways WAY

The program has the input and output of `bench.real_engine_ways`.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import uvloop

from bench.on_the_bus import bus_request, on_the_bus
from bench.real_engine_ways import Count, Run, gathered, serve, streamed
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

IN_PROCESS = "in-process"
OVER_THE_BUS = "rollbus"
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

    async def one(prompt: list[int], max_tokens: int, count: Count) -> None:
        key = next(keys)
        queue = queues[key] = asyncio.Queue(max_tokens)
        await engine.add(key, bus_request(prompt, max_tokens))
        while True:
            step = await queue.get()
            count.add(len(step.token_ids), 0)
            if step.finish_reason is not None:
                del queues[key]
                return

    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        handing_out = tasks.create_task(hand_out(), name="hand out")
        yield gathered(one)
        handing_out.cancel()


@asynccontextmanager
async def over_the_bus() -> AsyncIterator[Run]:
    """Run a worker with the engine in one process, a server in another, and the client in this process."""
    args = json.dumps(msgspec.to_builtins(ENGINE_CONFIG))
    async with on_the_bus("--engine", "synthetic", "--engine-args", args) as (rb, _):
        yield streamed(rb)


WAYS: dict[str, Callable[[], AbstractAsyncContextManager[Run]]] = {
    IN_PROCESS: in_process,
    OVER_THE_BUS: over_the_bus,
}
"""The two ways, by name."""


if __name__ == "__main__":
    uvloop.run(serve(WAYS[sys.argv[1]]()))
