"""The ways from a real vLLM engine to a program that `bench.real_engine` compares, each in its own process.

    python -m bench.real_engine_ways WAY MODEL_DIR

The program reads lines of `CONCURRENCY TOKENS` on stdin and answers each with one line of JSON: `seconds`, `tokens`,
`rows`, and `first_s` of each request. All ways send the same requests: prompts of 16 tokens, one logprob for each
token, routed experts, greedy, with exactly TOKENS tokens.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import uvloop

import rollbus
from bench.on_the_bus import START_S, bus_request, on_the_bus
from bench.ways import answer

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


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    uvloop.run(serve(WAYS[sys.argv[1]](sys.argv[2])))
