"""The ways from a synthetic engine to a program that `bench.transport` compares, each in its own process.

    python -m bench.transport_ways WAY

This process is the client. The engine is in the process of a worker or server. The program reads lines of `REQUESTS
TOKENS SERIAL` on stdin and answers each with one line of JSON, a `Round`. All ways send the same requests: prompts of
16 tokens, one logprob for each token, no routed experts, greedy, with exactly TOKENS tokens.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass

import aiohttp
import numpy as np
import orjson
import uvloop

from bench.cpu import cpu_s
from bench.on_the_bus import START_S, bus_request, on_the_bus
from bench.ways import answer
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

PROMPT_TOKENS = 16
ENGINE_ARGS = {"max_num_seqs": 1024}
SYNTHETIC = ("--engine", "synthetic", "--engine-args", json.dumps(ENGINE_ARGS))


@dataclass(slots=True)
class Result:
    """The result of one request, in the form in which a program uses it."""

    token_ids: list[int]
    logprobs: list[float]
    chunks: int
    """Number of pieces in which the result arrived."""


@dataclass(slots=True)
class Round:
    """The figures of one measurement."""

    seconds: float
    tokens: int
    chunks: int
    token_sum: int
    logprob_sum: float
    """Sum of the log probabilities. This sum and `token_sum` show whether all ways gave the same result. It is exact,
    because the engine's log probabilities are multiples of 1/256."""
    cpu_s: Mapping[str, float]
    """CPU seconds of each process: `worker` is the one with the engine."""


Prompts = list[list[int]]
Run = Callable[[Prompts, int], Awaitable[Iterable[Result]]]
"""Generates `max_tokens` tokens for each prompt, with all prompts at once. The iteration over the results is not
measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """A running way."""

    run: Run
    pids: Mapping[str, int]
    """Ids of the processes except this one."""


def make_prompts(requests: int, serial: int) -> Prompts:
    """Return different prompts for one measurement."""
    return [[serial, number, *range(2, PROMPT_TOKENS)] for number in range(requests)]


@asynccontextmanager
async def engine_alone() -> AsyncIterator[Way]:
    """Run the engine in this process and read it as a worker does. No transport can be faster."""
    engine = SyntheticEngine(SyntheticConfig.from_args(ENGINE_ARGS))
    await engine.start()
    # All measurements use the same reader, because the engine continues where the last measurement ended.
    batches = engine.steps()

    async def run(prompts: Prompts, max_tokens: int) -> Iterable[Result]:
        keys = [str(i) for i in range(len(prompts))]
        for key, prompt in zip(keys, prompts, strict=True):
            await engine.add(key, bus_request(prompt, max_tokens, routing=False))
        made: list[RequestStep | TokenBatch] = []
        num_open = len(prompts)
        while num_open:
            steps = await anext(batches)
            made += steps
            num_open -= sum(isinstance(step, RequestStep) and step.finish_reason is not None for step in steps)
        return results_of(keys, made)

    yield Way(run, {})
    await engine.close()


def results_of(keys: Iterable[str], made: Iterable[RequestStep | TokenBatch]) -> Iterator[Result]:
    """Yield the results of these requests in their order. The work starts when the caller asks for the first result."""
    results = {key: Result([], [], 0) for key in keys}
    for step in split(made):
        results[step.key].token_ids += step.token_ids.tolist()
        results[step.key].logprobs += [] if step.logprobs is None else step.logprobs.tolist()
    yield from results.values()


@asynccontextmanager
async def rollbus_whole() -> AsyncIterator[Way]:
    """Run `complete_many`: whole results, for which the worker batches the tokens."""
    async with on_the_bus(*SYNTHETIC) as (rb, pids):

        async def run(prompts: Prompts, max_tokens: int) -> list[Result]:
            results = []
            requests = [bus_request(prompt, max_tokens, routing=False) for prompt in prompts]
            async for generation in rb.complete_many(requests, max_in_flight=len(requests)):
                if generation.error is not None or generation.logprobs is None:
                    raise RuntimeError(f"no result: {generation.error}")
                results.append(Result(generation.token_ids.tolist(), generation.logprobs.tolist(), 1))
            return results

        yield Way(run, pids)


@asynccontextmanager
async def rollbus_chunks() -> AsyncIterator[Way]:
    """Run `generate`: a loop over the chunks of each request."""
    async with on_the_bus(*SYNTHETIC) as (rb, pids):

        async def one(prompt: list[int], max_tokens: int) -> Result:
            result = Result([], [], 0)
            async for chunk in rb.generate(bus_request(prompt, max_tokens, routing=False)):
                if chunk.logprobs is None:
                    raise RuntimeError(f"the chunk has no logprobs: {chunk!r}")
                result.token_ids += chunk.token_ids.tolist()
                result.logprobs += chunk.logprobs.tolist()
                result.chunks += 1
            return result

        yield Way(at_once(one), pids)


def at_once(one: Callable[[list[int], int], Awaitable[Result]]) -> Run:
    """Return a run that runs `one` for all prompts at once."""

    async def run(prompts: Prompts, max_tokens: int) -> list[Result]:
        results: list[Result] = []

        async def add(prompt: list[int]) -> None:
            results.append(await one(prompt, max_tokens))

        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(add(prompt))
        return results

    return run


@asynccontextmanager
async def sse() -> AsyncIterator[Way]:
    """Run `bench.transport_sse`. aiohttp reads all available bytes at once, and orjson decodes each event."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.transport_sse", json.dumps(ENGINE_ARGS)), stdout=asyncio.subprocess.PIPE
    )
    try:
        if server.stdout is None:
            raise RuntimeError("the process was started without pipes")
        port = int(await asyncio.wait_for(server.stdout.readline(), START_S))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:

            async def one(prompt: list[int], max_tokens: int) -> Result:
                sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
                body = orjson.dumps({"token_ids": prompt, "sampling_params": sampling, "stream": True})
                headers = {"Content-Type": "application/json"}
                result, rest = Result([], [], 0), b""
                async with session.post("/inference/v1/generate", data=body, headers=headers) as response:
                    response.raise_for_status()
                    async for data in response.content.iter_any():
                        *events, rest = (rest + data).split(b"\n\n")
                        for event in events:
                            add_event(event, result)
                return result

            yield Way(at_once(one), {"worker": server.pid})
    finally:
        server.terminate()
        await server.wait()


def add_event(event: bytes, result: Result) -> None:
    """Add the token of an event."""
    if not event.startswith(b"data: {"):
        return
    [choice] = orjson.loads(event[6:])["choices"]
    result.token_ids += choice["token_ids"]
    result.logprobs += [token["logprob"] for token in choice["logprobs"]["content"]]
    result.chunks += 1


WAYS: dict[str, Callable[[], AbstractAsyncContextManager[Way]]] = {
    "rollbus": rollbus_whole,
    "rollbus-chunks": rollbus_chunks,
    "sse": sse,
    "engine": engine_alone,
}
"""The ways, by name."""


async def measure(way: Way, requests: int, tokens: int, serial: int) -> Round:
    """Run one measurement."""
    pids = {"client" if way.pids else "worker": os.getpid(), **way.pids}
    prompts = make_prompts(requests, serial)
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    started = time.perf_counter()
    unread = await way.run(prompts, tokens)
    seconds = time.perf_counter() - started
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    results = list(unread)
    return Round(
        seconds=seconds,
        cpu_s=used,
        tokens=sum(len(result.token_ids) for result in results),
        chunks=sum(result.chunks for result in results),
        token_sum=int(np.sum([sum(result.token_ids) for result in results])),
        logprob_sum=sum(sum(result.logprobs) for result in results),
    )


async def serve(name: str) -> None:
    """Run the measurements that stdin requests, until stdin ends."""
    async with WAYS[name]() as way:

        async def measured(arguments: list[str]) -> object:
            return asdict(await measure(way, *map(int, arguments)))

        await answer(measured)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
