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

The ways are those of `bench.ways`, without routed experts. The engine is in the process of a worker or server.

The server of `sse` is a synthetic engine behind Starlette, uvicorn, uvloop and httptools. orjson encodes the events.
`/inference/v1/generate` answers with one event for each token. An event has the fields that vLLM's route of the same
name writes, in the same order. It also has `weight_version`, like each chunk of rollbus.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from bench.processes import Way, answer, bus_request, own_process
from bench.report import Load, Report, parse_loads, program
from bench.ways import Prompts, Result, Run, ask, cpu_ms, event_reader, rate, rollbus_chunks, rollbus_many, serve
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.frontend.cli.tables import Spread, Value
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.options import arg
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

ENGINE_ARGS = {"max_num_seqs": 1024}
SYNTHETIC = ("--engine", "synthetic", "--engine-args", json.dumps(ENGINE_ARGS))


@asynccontextmanager
async def engine_alone() -> AsyncIterator[Run]:
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

    yield run
    await engine.close()


def results_of(keys: Iterable[str], made: Iterable[RequestStep | TokenBatch]) -> Iterator[Result]:
    """Yield the results of these requests in their order. The work starts when the caller asks for the first result."""
    results = {key: Result(0.0) for key in keys}
    for step in split(made):
        results[step.key].token_ids += step.token_ids.tolist()
        results[step.key].logprobs += [] if step.logprobs is None else step.logprobs.tolist()
    yield from results.values()


@asynccontextmanager
async def sse() -> AsyncIterator[Run]:
    """Run the server of this module in its own process, and read its events."""
    async with (
        own_process("server", "transport:serve_events", json.dumps(ENGINE_ARGS)) as server,
        event_reader((await server.ask("url"))["url"]) as run,
    ):
        yield run


WAYS: dict[str, Callable[[], AbstractAsyncContextManager[Run]]] = {
    "rollbus": partial(rollbus_many, *SYNTHETIC, streams=False, routing=False),
    "rollbus-many": partial(rollbus_many, *SYNTHETIC, streams=True, routing=False),
    "rollbus-chunks": partial(rollbus_chunks, *SYNTHETIC, routing=False),
    "sse": sse,
    "engine": engine_alone,
}
"""The ways, by name."""


async def way(name: str) -> None:
    """Serve one way in this process."""
    await serve(WAYS[name]())


PEER = "sse"
PROCESSES = ("worker", "client", "nats")
Answer = dict[str, Any]
"""The figures of one round of one way."""


async def measure(names: Sequence[str], loads: Sequence[Load], rounds: int, report: Report) -> None:
    """Add the rows to the report, in the order of loads and ways."""
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(own_process(name, "transport:way", name)) for name in names]
        for load in loads:
            await turn(ways, load)
            turns = [await turn(ways, load) for _ in range(rounds)]
            for name in names:
                report.add(**row(name, load, turns))


async def turn(ways: Sequence[Way], load: Load) -> dict[str, Answer]:
    """Measure each way once.

    Raises:
        RuntimeError: a way has ended, or it gave too few tokens, or its tokens differ from those of the other ways.
    """
    answers = {way.name: await ask(way, load) for way in ways}
    # The sum of the log probabilities is exact, because the engine's log probabilities are multiples of 1/256.
    if len({(one["token_sum"], one["logprob_sum"]) for one in answers.values()}) != 1:
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
            columns[f"{process}_cpu_ms"] = Spread.of([cpu_ms(one, process) for one in own])
    columns["all_cpu_ms"] = Spread.of([cpu_ms(one) for one in own])
    if own[0]["chunks"]:
        columns["tokens_at_a_time"] = Spread.of([one["tokens"] / one["chunks"] for one in own])
    if name != PEER and PEER in turns[0]:
        columns["times_sse"] = Spread.of([rate(answers[name]) / rate(answers[PEER]) for answers in turns])
        columns["share_of_sse_cpu"] = Spread.of([cpu_ms(answers[name]) / cpu_ms(answers[PEER]) for answers in turns])
    return columns


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
    """Serve until stdin ends. Answer each line on stdin with the URL."""
    engine = SyntheticEngine(SyntheticConfig.from_args(json.loads(engine_args)))
    await engine.start()
    service = Service(engine)
    app = Starlette(routes=[Route("/inference/v1/generate", service.generate, methods=["POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, http="httptools", ws="none", lifespan="off", access_log=False, log_level="error")
    )
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def say_url(_question: list[str]) -> object:
            return {"url": url}

        async with asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(service.run(), name="steps")
            tasks.create_task(server.serve(sockets=[listening]))
            await answer(say_url)
            server.should_exit = True
            steps.cancel()


if __name__ == "__main__":
    program(
        "transport",
        "Measure only the transport.",
        lambda args, report: asyncio.run(measure(args.ways, parse_loads(args.loads), args.rounds, report)),
        arg("--loads", "REQUESTSxTOKENS", "", nargs="+", default=["64x1024", "256x512"]),
        arg("--ways", WAYS, "", nargs="+", default=list(WAYS)),
    )
