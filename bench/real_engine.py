"""Measures tokens per second of a real vLLM engine, with logprobs and routed experts, in several ways.

    python -m bench.real_engine [--loads 64x64 256x128] [--rounds 5] [--ways rollbus vllm-http ...] [--json FILE]

The ways are rollbus, vLLM's own HTTP server, and vLLM in process. Each way has its own
engine with the same tiny MoE. All engines run at the same time. The rounds of the ways take turns and begin with a
different way each time. So a slow phase of the machine affects all ways, and no way always follows the same other way.

A load of 64x64 is 64 requests at once, of 64 tokens each. `rows_share` is the number of received rows divided by the
number that the row rule requires. CPU is the time of all processes of a way with its engine, per 1,000 tokens. For
rollbus it is also shown for the client, nats-server, and the worker without its engine core. `times_http` and
`times_in_process` are tokens per second divided by those of `vllm-http` and `vllm-delta` in the same round.

Each way runs in its own process. It reads lines of `CONCURRENCY TOKENS` on stdin and answers each with one line of
JSON: `seconds`, `tokens`, `rows`, and `first_s` of each request. All ways send the same requests: prompts of 16 tokens,
one logprob for each token, routed experts, greedy, with exactly TOKENS tokens.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

import rollbus
from bench.processes import START_S, Way, answer, bus_request, on_the_bus, own_process
from bench.report import Load, Report, cpu_s, parse_loads, program, rate
from rollbus.frontend.cli.tables import Spread, Value
from rollbus.schemas.options import arg
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

PROMPT_TOKENS = 16
VOCAB_SIZE = 512
ENGINE_ARGS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_return_routed_experts": True,
    "max_model_len": 512,
    "max_num_seqs": 256,
    "block_size": 32,
    "gpu_memory_utilization": 0.1,
}


@dataclass(slots=True)
class Count:
    """The result of one request."""

    started: float
    """Time on `time.perf_counter` at which this request and the other requests of the round were sent."""
    tokens: int = 0
    rows: int = 0
    first_s: float = 0.0
    """Seconds until the first token arrived. For whole results, seconds until the result arrived."""

    def add(self, tokens: int, rows: int) -> None:
        """Add tokens and rows that arrived."""
        if not self.tokens:
            self.first_s = time.perf_counter() - self.started
        self.tokens += tokens
        self.rows += rows


Run = Callable[[list[list[int]], int], Awaitable[list[Count]]]
"""Generates `max_tokens` tokens for each prompt, with all prompts at once."""


def make_prompts(concurrency: int, serial: int) -> list[list[int]]:
    """Return prompts that no earlier measurement used, so that the prefix cache does not favour a way."""
    numbers = range(serial * 100_003, serial * 100_003 + concurrency)
    return [
        [(number * 31 + i * i * 7 + number // VOCAB_SIZE) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        for number in numbers
    ]


@asynccontextmanager
async def rollbus_whole(model: str) -> AsyncIterator[Run]:
    """Run `complete_many`: whole results, for which the worker batches the tokens."""
    async with on_the_bus("--model", model, "--engine-args", json.dumps(ENGINE_ARGS)) as (rb, _):

        async def run(prompts: list[list[int]], max_tokens: int) -> list[Count]:
            started = time.perf_counter()
            counts = []
            requests = [bus_request(prompt, max_tokens) for prompt in prompts]
            async for generation in rb.complete_many(requests, max_in_flight=len(requests)):
                if generation.error is not None or generation.routed_experts is None:
                    raise RuntimeError(f"no result: {generation.error}")
                counts.append(Count(started))
                counts[-1].add(len(generation.token_ids), len(generation.routed_experts))
            return counts

        yield run


@asynccontextmanager
async def rollbus_chunks(model: str) -> AsyncIterator[Run]:
    """Run `generate`: a loop over the chunks of each request."""
    async with on_the_bus("--model", model, "--engine-args", json.dumps(ENGINE_ARGS)) as (rb, _):
        yield streamed(rb)


def streamed(rb: rollbus.Client) -> Run:
    """Return a run that reads the chunks of each request in a loop."""

    async def one(prompt: list[int], max_tokens: int, count: Count) -> None:
        async for chunk in rb.generate(bus_request(prompt, max_tokens)):
            count.add(chunk.num_tokens, 0 if chunk.routed_experts is None else chunk.routed_experts.shape[0])

    return gathered(one)


def gathered(one: Callable[[list[int], int, Count], Coroutine[Any, Any, None]]) -> Run:
    """Return a run that runs `one` for all prompts at once."""

    async def run(prompts: list[list[int]], max_tokens: int) -> list[Count]:
        started = time.perf_counter()
        counts = [Count(started) for _ in prompts]
        async with asyncio.TaskGroup() as tasks:
            for prompt, count in zip(prompts, counts, strict=True):
                tasks.create_task(one(prompt, max_tokens, count))
        return counts

    return run


@asynccontextmanager
async def in_process(model: str, **more: Any) -> AsyncIterator[Run]:
    """Run `AsyncLLM.generate` with DELTA outputs in this process: vLLM without any transport."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **ENGINE_ARGS, **more))

    async def one(prompt: list[int], max_tokens: int, count: Count) -> None:
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
            count.add(len(sample.token_ids), 0 if sample.routed_experts is None else len(sample.routed_experts))

    try:
        yield gathered(one)
    finally:
        llm.shutdown()


@asynccontextmanager
async def in_one_core(model: str) -> AsyncIterator[Run]:
    """Run `in_process` with the model in the process of the engine core, as in rollbus's workers on a CPU."""
    async with in_process(model, distributed_executor_backend="uni") as run:
        yield run


@asynccontextmanager
async def http_server(model: str) -> AsyncIterator[Run]:
    """Run vLLM's own token server. aiohttp and msgspec read its server-sent events."""
    import aiohttp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
        for name, value in ENGINE_ARGS.items()
    ]
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--tokens-only", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "error", "--disable-log-stats", *options),
        stdout=asyncio.subprocess.DEVNULL,
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, read_bufsize=2**20) as session:

        async def one(prompt: list[int], max_tokens: int, count: Count) -> None:
            sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            body = msgspec.json.encode({"token_ids": prompt, "sampling_params": sampling, "stream": True})
            headers = {"Content-Type": "application/json"}
            async with session.post("/inference/v1/generate", data=body, headers=headers) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    for choice in msgspec.json.decode(line[6:])["choices"]:
                        routing = choice.get("routed_experts")
                        rows = 0 if routing is None else len(np.load(io.BytesIO(base64.b64decode(routing))))
                        count.add(len(choice.get("token_ids") or ()), rows)

        try:
            await until_ready(session, server)
            yield gathered(one)
        finally:
            server.terminate()
            await server.wait()


async def until_ready(session: Any, server: asyncio.subprocess.Process) -> None:
    """Wait until `/health` succeeds.

    Raises:
        RuntimeError: the server has ended.
        TimeoutError: the server is not ready in time.
    """
    import aiohttp

    async with asyncio.timeout(START_S):
        while server.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get("/health") as response:
                    if response.ok:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the server exited with code {server.returncode}")


WAYS: dict[str, Callable[[str], Any]] = {
    "rollbus": rollbus_whole,
    "rollbus-chunks": rollbus_chunks,
    "vllm-http": http_server,
    "vllm-delta": in_process,
    "vllm-delta-uni": in_one_core,
}
"""The ways, by name."""


async def serve(way: AbstractAsyncContextManager[Run]) -> None:
    """Run the measurements that stdin requests, until stdin ends."""
    serials = itertools.count()
    async with way as run:

        async def measure(question: list[str]) -> dict[str, Any]:
            concurrency, max_tokens = map(int, question)
            prompts = make_prompts(concurrency, next(serials))
            started = time.perf_counter()
            counts = await run(prompts, max_tokens)
            return {
                "seconds": time.perf_counter() - started,
                "tokens": sum(count.tokens for count in counts),
                "rows": sum(count.rows for count in counts),
                "first_s": [count.first_s for count in counts],
            }

        await answer(measure)


async def way(name: str, model: str) -> None:
    """Serve one way in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    await serve(WAYS[name](model))


MODEL = Path.home() / ".cache" / "rollbus" / "bench-tiny-moe"
PEERS = {"times_http": "vllm-http", "times_in_process": "vllm-delta"}
SETTLE_S = 0.3


@asynccontextmanager
async def on_real_engines(names: Sequence[str]) -> AsyncIterator[list[Way]]:
    """Start these ways, each with an engine."""
    model = make_tiny_moe(MODEL)
    async with AsyncExitStack() as stack:
        # Start the engines one after the other. Engines that start at the same time count the same free memory.
        yield [await stack.enter_async_context(own_process(name, "real_engine:way", name, model)) for name in names]


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


if __name__ == "__main__":
    program(
        "real_engine",
        "Measure tokens per second of a real engine.",
        lambda args, report: asyncio.run(measure(report, args.ways, parse_loads(args.loads), args.rounds)),
        arg("--loads", None, "", nargs="+", default=["64x64", "256x128"]),
        arg("--ways", WAYS, "", nargs="+", default=list(WAYS)),
    )
