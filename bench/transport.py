"""Measures tokens per second and CPU of the transport only: rollbus, and a good server of server-sent events.

    python -m bench.transport [--loads 64x1024 256x512] [--ways rollbus sse ...] [--rounds 5] [--json FILE]

A synthetic engine makes one token per step for each request, at its full speed. Each chunk and event has logprobs and
the weight version. All ways have the same engine in the process of their worker or server. Their clients are separate
processes. All ways must give the same tokens and logprobs. A load of 64x1024 is 64 requests at once, of 1,024 tokens
each.

`engine` is the engine without a transport. `tokens_at_a_time` is the number of
tokens that the reader receives at once; with `complete_many` these are all tokens of a request. CPU is in milliseconds
per 1,000 tokens, for the worker (or the server with its engine), the client, nats-server, and all together. `times_sse`
is tokens per second, and `share_of_sse_cpu` the CPU of all processes, each divided by the figure of `sse` in the same
round.

The process of a way is the client. The engine is in the process of a worker or server. A way reads lines of `REQUESTS
TOKENS SERIAL` on stdin and answers each with one line of JSON, a `Round`. All ways send the same requests: prompts of
16 tokens, one logprob for each token, no routed experts, greedy, with exactly TOKENS tokens.

The server of `sse` is a synthetic engine behind Starlette, uvicorn, uvloop and httptools. orjson encodes the events.
`/inference/v1/generate` answers with one event for each token. An event has the fields that vLLM's route of the same
name writes, in the same order. It also has `weight_version`, like each chunk of rollbus.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from bench.processes import START_S, answer, bus_request, on_the_bus, own_process, write
from bench.processes import Way as WayProcess
from bench.report import Load, Report, cpu_s, parse_loads, program, rate
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.frontend.cli.tables import Spread, Value
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.options import arg
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
    """Run `bench.transport`. aiohttp reads all available bytes at once, and orjson decodes each event."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.processes", "transport:serve_events", json.dumps(ENGINE_ARGS)),
        stdout=asyncio.subprocess.PIPE,
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


async def measure_way(way: Way, requests: int, tokens: int, serial: int) -> Round:
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
            return asdict(await measure_way(way, *map(int, arguments)))

        await answer(measured)


PEER = "sse"
PROCESSES = ("worker", "client", "nats")
Answer = dict[str, Any]
"""The fields of a `bench.transport.Round`."""


async def measure(names: Sequence[str], loads: Sequence[Load], rounds: int, report: Report) -> None:
    """Add the rows to the report, in the order of loads and ways."""
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(own_process(name, "transport:serve", name)) for name in names]
        for load in loads:
            await turn(ways, load, 0)
            turns = [await turn(ways, load, serial) for serial in range(1, rounds + 1)]
            for name in names:
                report.add(**row(name, load, turns))


async def turn(ways: Sequence[WayProcess], load: Load, serial: int) -> dict[str, Answer]:
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


WEIGHT_VERSION = 0


Token = tuple[int, float | None, FinishReason | None]
"""Token id, log probability, and the finish reason if it is the last token of the request."""


class Stream:
    """The unread tokens of one request. Their number is at most the number of tokens that the request may generate."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._has_some = asyncio.Event()

    def put(self, token: Token) -> None:
        """Add a token."""
        self._tokens.append(token)
        self._has_some.set()

    async def next_tokens(self) -> list[Token]:
        """Wait for a token. Return all unread tokens."""
        await self._has_some.wait()
        self._has_some.clear()
        tokens, self._tokens = self._tokens, []
        return tokens


class Service:
    """An engine and the streams of its requests."""

    def __init__(self, engine: SyntheticEngine) -> None:
        self._engine = engine
        self._streams: dict[str, Stream] = {}
        self._num_requests = 0

    async def run(self) -> None:
        """Forward the output of each step until cancelled."""
        async for steps in self._engine.steps():
            for step in steps:
                if isinstance(step, TokenBatch):
                    logprobs = [None] * len(step) if step.logprobs is None else step.logprobs.tolist()
                    for key, token, logprob in zip(step.keys, step.token_ids.tolist(), logprobs, strict=True):
                        self._put(key, (token, logprob, None))
                else:
                    for i, token in enumerate(step.token_ids.tolist()):
                        logprob = None if step.logprobs is None else float(step.logprobs[i])
                        self._put(step.key, (token, logprob, step.finish_reason))

    def _put(self, key: str, token: Token) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            stream.put(token)

    async def generate(self, request: Request) -> StreamingResponse:
        """Accept a request and answer with its events."""
        body = orjson.loads(await request.body())
        sampling = SamplingParams(**body["sampling_params"])
        self._num_requests += 1
        key = f"generate-tokens-{self._num_requests:032x}"
        self._streams[key] = stream = Stream()
        asked = GenerateRequest(
            prompt_token_ids=body["token_ids"], sampling=sampling, request_id=key, return_routed_experts=False
        )
        await self._engine.add(key, asked)
        return StreamingResponse(self._events(key, stream), media_type="text/event-stream")

    async def _events(self, key: str, stream: Stream) -> AsyncIterator[bytes]:
        is_over = False
        try:
            while not is_over:
                tokens = await stream.next_tokens()
                is_over = tokens[-1][2] is not None
                yield b"".join([event(key, token) for token in tokens])
            yield b"data: [DONE]\n\n"
        finally:
            del self._streams[key]
            if not is_over:
                await self._engine.abort([key])


def event(key: str, made: Token) -> bytes:
    """Return one token in the form of vLLM's `GenerateStreamResponse`."""
    token, logprob, finish_reason = made
    name = f"token_id:{token}"
    top = {"token": name, "logprob": logprob, "bytes": None}
    choice = {
        "index": 0,
        "logprobs": {"content": [{"token": name, "logprob": logprob, "bytes": None, "top_logprobs": [top]}]},
        "finish_reason": finish_reason,
        "token_ids": [token],
        "routed_experts": None,
        "sampling_mask": None,
    }
    body = {"request_id": key, "choices": [choice], "usage": None, "weight_version": WEIGHT_VERSION}
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def serve_events(engine_args: str) -> None:
    """Serve until terminated."""
    engine = SyntheticEngine(SyntheticConfig.from_args(json.loads(engine_args)))
    await engine.start()
    service = Service(engine)
    app = Starlette(routes=[Route("/inference/v1/generate", service.generate, methods=["POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, http="httptools", ws="none", lifespan="off", access_log=False, log_level="error")
    )
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        write(str(listening.getsockname()[1]))
        async with asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(service.run(), name="steps")
            await server.serve(sockets=[listening])
            steps.cancel()


if __name__ == "__main__":
    program(
        "transport",
        "Measure only the transport.",
        lambda args, report: asyncio.run(measure(args.ways, parse_loads(args.loads), args.rounds, report)),
        arg("--loads", "REQUESTSxTOKENS", "", nargs="+", default=["64x1024", "256x512"]),
        arg("--ways", WAYS, "", nargs="+", default=list(WAYS)),
    )
