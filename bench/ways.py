"""The ways from an engine to a program that `bench.transport`, `bench.real_engine` and `bench.latency` compare.

Each way runs in its own process, which is the client. It reads lines of `REQUESTS TOKENS` on stdin and answers each
with one line of JSON, the figures of one round. All ways send the same requests: prompts of 16 tokens, one logprob for
each token, greedy, with exactly TOKENS tokens.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil

import rollbus
from bench.processes import START_S, Way, answer, bus_request, on_the_bus, program_process
from bench.report import Load, cpu_s

PROMPT_TOKENS = 16
VOCAB_SIZE = 512
PATH = "/inference/v1/generate"


@dataclass(slots=True)
class Result:
    """The result of one request, in the form in which a program uses it."""

    started: float
    """Time on `time.perf_counter` at which this request and the other requests of the round were sent."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rows: int = 0
    """Number of rows of routed experts."""
    chunks: int = 0
    """Number of pieces in which the result arrived."""
    first_s: float = 0.0
    """Seconds until the first token arrived. For whole results, seconds until the result arrived."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], rows: int = 0) -> None:
        """Add a piece that arrived."""
        if not self.token_ids:
            self.first_s = time.perf_counter() - self.started
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.rows += rows
        self.chunks += 1

    def add_part(self, part: rollbus.Chunk | rollbus.Generation) -> None:
        """Add a chunk or a whole result of rollbus."""
        if part.error is not None or part.logprobs is None:
            raise RuntimeError(f"no tokens with logprobs: {part!r}")
        rows = 0 if part.routed_experts is None else part.routed_experts.shape[0]
        self.add(part.token_ids.tolist(), part.logprobs.tolist(), rows)


Prompts = list[list[int]]
Run = Callable[..., Awaitable[Iterable[Result]]]
"""Generates `max_tokens` tokens for each prompt, with all prompts at once or as many as a third argument says. The
iteration over the results is not measured."""


def make_prompts(requests: int, serial: int) -> Prompts:
    """Return prompts that no earlier measurement used, so that the prefix cache does not favour a way."""
    numbers = range(serial * 100_003, serial * 100_003 + requests)
    return [
        [(number * 31 + i * i * 7 + number // VOCAB_SIZE) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        for number in numbers
    ]


def at_once(one: Callable[[list[int], int, Result], Coroutine[Any, Any, None]]) -> Run:
    """Return a run that runs `one` for all prompts, `in_flight` at once."""

    async def run(prompts: Prompts, max_tokens: int, in_flight: int | None = None) -> list[Result]:
        started = time.perf_counter()
        results = [Result(started) for _ in prompts]
        waiting = iter(zip(prompts, results, strict=True))

        async def work() -> None:
            for prompt, result in waiting:
                await one(prompt, max_tokens, result)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight or len(prompts)):
                tasks.create_task(work())
        return results

    return run


def in_one_loop(rb: rollbus.Client, *, streams: bool, routing: bool | None = None) -> Run:
    """Return a run with one loop for all requests.

    With `streams`, `stream_many` returns all chunks that have come. Without, `complete_many` returns whole results, for
    which the worker batches the tokens.
    """

    async def run(prompts: Prompts, max_tokens: int, in_flight: int | None = None) -> Iterable[Result]:
        started = time.perf_counter()
        requests = [bus_request(prompt, max_tokens, routing=routing) for prompt in prompts]
        results = {request.request_id: Result(started) for request in requests}
        many = rb.stream_many if streams else rb.complete_many
        async for parts in many(requests, max_in_flight=in_flight or len(requests)):
            for part in parts if isinstance(parts, list) else [parts]:
                results[part.request_id].add_part(part)
        return results.values()

    return run


def in_loops(rb: rollbus.Client, *, routing: bool | None = None) -> Run:
    """Return a run of `generate`: a loop over the chunks of each request."""

    async def one(prompt: list[int], max_tokens: int, result: Result) -> None:
        async for chunk in rb.generate(bus_request(prompt, max_tokens, routing=routing)):
            result.add_part(chunk)

    return at_once(one)


@asynccontextmanager
async def rollbus_many(*worker_args: str, streams: bool, routing: bool | None = None) -> AsyncIterator[Run]:
    """Run `in_one_loop` on a bus of its own."""
    async with on_the_bus(*worker_args) as rb:
        yield in_one_loop(rb, streams=streams, routing=routing)


@asynccontextmanager
async def rollbus_chunks(*worker_args: str, routing: bool | None = None) -> AsyncIterator[Run]:
    """Run `in_loops` on a bus of its own."""
    async with on_the_bus(*worker_args) as rb:
        yield in_loops(rb, routing=routing)


@asynccontextmanager
async def event_reader(url: str) -> AsyncIterator[Run]:
    """Read the server-sent events of vLLM's token server or of a server like it.

    aiohttp reads all available bytes at once, and orjson decodes each event.
    """
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, read_bufsize=2**20) as session:

        async def one(prompt: list[int], max_tokens: int, result: Result) -> None:
            body = orjson.dumps(stream_body(prompt, max_tokens))
            rest = b""
            async with session.post(PATH, data=body, headers={"Content-Type": "application/json"}) as response:
                response.raise_for_status()
                async for data in response.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        add_event(event, result)

        yield at_once(one)


def stream_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a request for a stream from vLLM's token server."""
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return {"token_ids": prompt, "sampling_params": sampling, "stream": True}


def add_event(event: bytes, result: Result) -> None:
    """Add the tokens of an event."""
    if event.startswith(b"data: {"):
        for choice in orjson.loads(event[6:])["choices"]:
            routing = choice.get("routed_experts")
            rows = 0 if routing is None else len(np.load(io.BytesIO(base64.b64decode(routing))))
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]] if choice["logprobs"] else []
            result.add(choice["token_ids"] or [], logprobs, rows)


def vllm_answer(token_ids: Sequence[int], logprobs: Sequence[float], routed_experts: object) -> dict[str, Any]:
    """Return a whole answer of vLLM's token server, as vLLM 0.30 writes it for `logprobs=1`."""
    content = []
    for token, logprob in zip(token_ids, logprobs, strict=True):
        entry = {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
        content.append({**entry, "top_logprobs": [entry]})
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "length",
        "token_ids": token_ids,
        "routed_experts": routed_experts,
        "sampling_mask": None,
    }
    return {"request_id": "rollout", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


@asynccontextmanager
async def vllm_server(
    model: str, engine_args: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """Run vLLM's own server while the body runs, and wait until it serves. Yield its URL.

    With the argument `tokens_only`, it serves only tokens, at `PATH`.
    """
    port = free_port()
    options = [
        f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
        for name, value in engine_args.items()
    ]
    arguments = ("--model", model, "--host", "127.0.0.1", "--port", str(port), *options)
    quiet = ("--uvicorn-log-level", "error", "--disable-log-stats")
    async with program_process("vllm.entrypoints.openai.api_server", *arguments, *quiet, env=env) as server:
        yield await wait_until_served(port, server)


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_served(port: int, server: asyncio.subprocess.Process, model: str = "") -> str:
    """Wait until an HTTP server on this machine serves the model. Return its URL.

    Raises:
        RuntimeError: the server has ended.
        TimeoutError: the server is not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    async with asyncio.timeout(START_S), aiohttp.ClientSession(url) as session:
        while not await _is_served(session, model):
            if server.returncode is not None:
                raise RuntimeError(f"the server exited with code {server.returncode}")
            await asyncio.sleep(0.2)
    return url


async def _is_served(session: aiohttp.ClientSession, model: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get("/v1/models" if model else "/health") as response:
            return response.ok and model in await response.text()
    return False


async def serve(way: AbstractAsyncContextManager[Run]) -> None:
    """Run the measurements that stdin requests, until stdin ends: further words are further arguments of the run."""
    serials = itertools.count()
    async with way as run:

        async def measure(question: list[str]) -> dict[str, Any]:
            num_requests, max_tokens = map(int, question[:2])
            prompts = make_prompts(num_requests, next(serials))
            pids = pids_by_kind()
            before = cpu_by_kind(pids)
            started = time.perf_counter()
            unread = await run(prompts, max_tokens, *question[2:])
            seconds = time.perf_counter() - started
            after = cpu_by_kind(pids)
            results = list(unread)
            return {
                "seconds": seconds,
                "cpu_s": {kind: spent - before[kind] for kind, spent in after.items()},
                "tokens": sum(len(result.token_ids) for result in results),
                "rows": sum(result.rows for result in results),
                "chunks": sum(result.chunks for result in results),
                "first_s": [result.first_s for result in results],
                "token_sum": sum(sum(result.token_ids) for result in results),
                "logprob_sum": sum(sum(result.logprobs) for result in results),
            }

        await answer(measure)


def pids_by_kind() -> dict[str, list[int]]:
    """Return this process and all processes that it started. A worker may have an engine core, a service is `http`."""
    own, found = os.getpid(), defaultdict[str, list[int]](list)
    children = psutil.Process().children(recursive=True)
    found["client" if children else "worker"].append(own)
    for one in children:
        kind = "nats" if one.name().startswith("nats") else "worker" if one.ppid() == own else "core"
        found["http" if any("frontend" in word for word in one.cmdline()) else kind].append(one.pid)
    return found


def cpu_by_kind(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the CPU seconds of these processes so far."""
    return {kind: sum(map(cpu_s, each)) for kind, each in pids.items()}


async def ask(way: Way, load: Load, *more: object) -> dict[str, Any]:
    """Run one round of a way in its process, with further arguments of its run.

    Raises:
        RuntimeError: the process has ended, or it returned too few tokens.
    """
    figures = await way.ask(*load, *more)
    if figures["tokens"] != load[0] * load[1]:
        raise RuntimeError(f"{way.name}: {figures['tokens']} tokens for the load {load[0]}x{load[1]}")
    return figures


def rate(figures: Mapping[str, Any]) -> float:
    """Return the tokens per second of one round."""
    return float(figures["tokens"] / figures["seconds"])


def cpu_ms(figures: Mapping[str, Any], kind: str | None = None) -> float:
    """Return the CPU milliseconds per 1,000 tokens of one kind of processes, or of all processes."""
    spent = sum(figures["cpu_s"].values()) if kind is None else figures["cpu_s"].get(kind, 0.0)
    return float(1e6 * spent / figures["tokens"])
