"""Measures tokens per second of a real vLLM engine, with logprobs and routed experts, in several ways.

    python -m bench.real_engine [--loads 64x64 256x128] [--rounds 5] [--ways rollbus vllm-http ...] [--json FILE]

The ways are rollbus, vLLM's own HTTP server, and vLLM in process. Each way has its own
engine with the same tiny MoE. All engines run at the same time. The rounds of the ways take turns and begin with a
different way each time. So a slow phase of the machine affects all ways, and no way always follows the same other way.

A load of 64x64 is 64 requests at once, of 64 tokens each. `rows_share` is the number of received rows divided by the
number that the row rule requires. CPU is the time of all processes of a way with its engine, per 1,000 tokens. For
rollbus it is also shown for the client, nats-server, and the worker without its engine core. `times_http` and
`times_in_process` are tokens per second divided by those of `vllm-http` and `vllm-delta` in the same round.

The ways are those of `bench.ways`, with routed experts.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from bench.processes import Way, own_process
from bench.report import TINY_MOE, Load, Report, parse_loads, program
from bench.ways import (
    PROMPT_TOKENS,
    Result,
    Run,
    ask,
    at_once,
    cpu_ms,
    event_reader,
    rate,
    rollbus_chunks,
    rollbus_many,
    serve,
    vllm_server,
)
from rollbus.frontend.cli.tables import Spread, Value
from rollbus.schemas.options import arg
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

ENGINE_ARGS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_return_routed_experts": True,
    "max_model_len": 512,
    "max_num_seqs": 256,
    "block_size": 32,
    "gpu_memory_utilization": 0.1,
}


@asynccontextmanager
async def in_process(model: str, **more: Any) -> AsyncIterator[Run]:
    """Run `AsyncLLM.generate` with DELTA outputs in this process: vLLM without any transport."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **ENGINE_ARGS, **more))

    async def one(prompt: list[int], max_tokens: int, result: Result) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        request_id = f"{prompt}-{time.monotonic_ns()}"
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id):
            [sample] = output.outputs
            result.add(sample.token_ids, [], 0 if sample.routed_experts is None else len(sample.routed_experts))

    try:
        yield at_once(one)
    finally:
        llm.shutdown()


@asynccontextmanager
async def in_one_core(model: str) -> AsyncIterator[Run]:
    """Run `in_process` with the model in the process of the engine core, as in rollbus's workers on a CPU."""
    async with in_process(model, distributed_executor_backend="uni") as run:
        yield run


@asynccontextmanager
async def http_server(model: str) -> AsyncIterator[Run]:
    """Run vLLM's own token server, and read its events."""
    async with vllm_server(model, {**ENGINE_ARGS, "tokens_only": True}) as url, event_reader(url) as run:
        yield run


WAYS: dict[str, Callable[[str], AbstractAsyncContextManager[Run]]] = {
    "rollbus": lambda model: rollbus_many("--model", model, "--engine-args", json.dumps(ENGINE_ARGS), streams=False),
    "rollbus-chunks": lambda model: rollbus_chunks("--model", model, "--engine-args", json.dumps(ENGINE_ARGS)),
    "vllm-http": http_server,
    "vllm-delta": in_process,
    "vllm-delta-uni": in_one_core,
}
"""The ways, by name."""


async def way(name: str, model: str) -> None:
    """Serve one way in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    await serve(WAYS[name](model))


PEERS = {"times_http": "vllm-http", "times_in_process": "vllm-delta"}
SETTLE_S = 0.3


@asynccontextmanager
async def on_real_engines(names: Sequence[str]) -> AsyncIterator[list[Way]]:
    """Start these ways, each with an engine."""
    model = make_tiny_moe(TINY_MOE)
    async with AsyncExitStack() as stack:
        # Start the engines one after the other. Engines that start at the same time count the same free memory.
        yield [await stack.enter_async_context(own_process(name, "real_engine:way", name, model)) for name in names]


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
        answers[way.name] = await ask(way, load)
    return answers


def row(name: str, load: Load, turns: Sequence[dict[str, Any]]) -> dict[str, Value]:
    """Return the row of one way with the figures of all rounds."""
    num_requests, num_tokens = load
    own = [answers[name] for answers in turns]
    columns: dict[str, Value] = {
        "way": name,
        "load": f"{num_requests}x{num_tokens}",
        "tokens_per_s": Spread.of([rate(one) for one in own]),
        "cpu_ms": Spread.of([cpu_ms(one) for one in own]),
        "rows_share": min(one["rows"] for one in own) / (num_requests * (PROMPT_TOKENS + num_tokens - 1)),
    }
    if name.startswith("rollbus"):
        for process in ("client", "nats", "worker"):
            columns[f"{process}_cpu_ms"] = Spread.of([cpu_ms(one, process) for one in own])
    for column, peer in PEERS.items():
        if peer != name and peer in turns[0]:
            columns[column] = Spread.of([rate(answers[name]) / rate(answers[peer]) for answers in turns])
    return columns


if __name__ == "__main__":
    program(
        "real_engine",
        "Measure tokens per second of a real engine.",
        lambda args, report: asyncio.run(measure(report, args.ways, parse_loads(args.loads), args.rounds)),
        arg("--loads", None, "", nargs="+", default=["64x64", "256x128"]),
        arg("--ways", WAYS, "", nargs="+", default=list(WAYS)),
    )
