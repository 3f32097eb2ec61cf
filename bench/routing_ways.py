"""The ways of a request's routed experts from the engine's array to a writable tensor that `bench.routing` compares.

    python -m bench.routing_ways server|client WAY CASE ADDRESS

Each side is a separate process. The ways:

- `rollbus`: a worker and `Client.complete`;
- `json`: the answer of vLLM's `/inference/v1/generate`. The server writes it as vLLM does: the bytes of a numpy file in
  base64 by pybase64, in JSON by the standard library. The client reads it as vLLM's documentation describes;
- `orjson`: the same with orjson, and pybase64 on both sides;
- `bare`: only sockets through the same nats-server (`bench.routing_bare`).

A server answers `address` and `handed`, the time at which the engine output its array. A client answers `get`, the time
at which the tensor was complete, and `check`, which is true if the tensor is correct. Both answer `idle`, after which
memory and CPU time count, `grown` and `cpu`.
"""

import base64
import hashlib
import io
import socket
import sys
import time
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson
import pybase64
import torch
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import rollbus
from bench.memory import give_back, peak_bytes, reset_peak, resident_bytes
from bench.routing_bare import bare_client, bare_server
from bench.routing_engine import CASES, Case, RoutedEngine, make_rows
from bench.ways import answer
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.engine import Engine
from rollbus.workers.worker import Worker

Handed = Callable[[], float]
"""Time of the engine's last output of an array, on `time.monotonic()`."""
Get = Callable[[int], Awaitable[torch.Tensor]]
"""Requests the rows of a prompt with this number of tokens."""
PATH = "/inference/v1/generate"


def prompt(num_tokens: int) -> npt.NDArray[np.int32]:
    """Return i4[num_tokens], the same each time."""
    return np.arange(num_tokens, dtype=np.int32) % 1000 + 10


def bus_request(num_prompt: int, num_tokens: int = 1) -> rollbus.GenerateRequest:
    """Return a request for the bus."""
    sampling = rollbus.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return rollbus.GenerateRequest(prompt_token_ids=prompt(num_prompt), sampling=sampling)


@asynccontextmanager
async def bus_server(case: Case, address: str) -> AsyncIterator[tuple[str, Handed]]:
    """Run a worker on the NATS server at `address`."""
    engine = RoutedEngine(case, step_s=0, is_fresh=True)
    async with running_worker(engine, address):
        yield address, lambda: engine.handed_at


@asynccontextmanager
async def running_worker(engine: Engine, address: str) -> AsyncIterator[None]:
    """Run a worker with `engine` while the body runs."""
    worker = Worker(WorkerConfig(nats_url=address, model="routing", prove_reload=False), engine)
    async with TaskGroup() as tasks:
        tasks.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()


def http_server(respond: Callable[[dict[str, Any]], Response]) -> Callable[[Case, str], Any]:
    """Return a server on uvicorn whose engine has the array ready."""

    @asynccontextmanager
    async def run(case: Case, _address: str) -> AsyncIterator[tuple[str, Handed]]:
        made, handed_at = make_rows(case), 0.0

        async def generate(request: Request) -> Response:
            nonlocal handed_at
            num_rows = len(orjson.loads(await request.body())["token_ids"])
            rows = made[:num_rows].copy()
            handed_at = time.monotonic()
            file = io.BytesIO()
            np.save(file, rows, allow_pickle=False)
            data = pybase64.b64encode(file.getbuffer()).decode("ascii")
            del file
            entry = {"token": "token_id:1", "logprob": -1.0, "bytes": None}
            choice = {
                "index": 0,
                "logprobs": {"content": [{**entry, "top_logprobs": [entry]}]},
                "finish_reason": "length",
                "token_ids": [1],
                "routed_experts": data,
                "sampling_mask": None,
            }
            return respond({"request_id": "r", "choices": [choice], "prompt_logprobs": None})

        app = Starlette(routes=[Route(PATH, generate, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with TaskGroup() as tasks:
                tasks.create_task(server.serve(sockets=[listener]))
                try:
                    yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: handed_at
                finally:
                    server.should_exit = True

    return run


def with_orjson(content: dict[str, Any]) -> Response:
    """Return an answer that orjson encodes."""
    return Response(orjson.dumps(content), media_type="application/json")


@asynccontextmanager
async def bus_client(address: str) -> AsyncIterator[Get]:
    """Run a client of the bus."""
    async with rollbus.connect(address) as rb:
        await rb.fleet.wait_for_workers(timeout_s=30)

        async def get(num_tokens: int) -> torch.Tensor:
            generation = await rb.complete(bus_request(num_tokens))
            if generation.routed_experts is None:
                raise RuntimeError("the result has no routed experts")
            return torch.from_numpy(generation.routed_experts)

        yield get


def http_client(read: Callable[[aiohttp.ClientResponse], Awaitable[bytes]]) -> Callable[[str], Any]:
    """Return a client that gets the bytes of the numpy file from `read`."""

    @asynccontextmanager
    async def run(address: str) -> AsyncIterator[Get]:
        async with aiohttp.ClientSession(address, read_bufsize=2**20) as session:

            async def get(num_tokens: int) -> torch.Tensor:
                sampling = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 1}
                body = orjson.dumps({"token_ids": prompt(num_tokens).tolist(), "sampling_params": sampling})
                async with session.post(PATH, data=body, headers={"Content-Type": "application/json"}) as response:
                    response.raise_for_status()
                    return torch.from_numpy(np.load(io.BytesIO(await read(response))))

            yield get

    return run


async def read_json(response: aiohttp.ClientResponse) -> bytes:
    """Decode with the standard library, as vLLM's documentation of the field describes."""
    return base64.b64decode((await response.json())["choices"][0]["routed_experts"])


async def read_orjson(response: aiohttp.ClientResponse) -> bytes:
    """Decode with the fastest library for each format."""
    return pybase64.b64decode(orjson.loads(await response.read())["choices"][0]["routed_experts"])


WAYS: dict[str, tuple[Callable[[Case, str], Any], Callable[[str], Any]]] = {
    "rollbus": (bus_server, bus_client),
    "json": (http_server(JSONResponse), http_client(read_json)),
    "orjson": (http_server(with_orjson), http_client(read_orjson)),
    "bare": (bare_server, bare_client),
}
"""Server and client of each way."""


class Meter:
    """Memory and CPU time of this process."""

    def __init__(self) -> None:
        self._idle_bytes = 0
        self._idle_cpu_s = 0.0

    def answer(self, question: str) -> dict[str, float]:
        """Answer the commands that both sides support."""
        match question:
            case "idle":
                give_back()
                reset_peak()
                self._idle_bytes = resident_bytes()
                return {}
            case "grown":
                return {"bytes": peak_bytes() - self._idle_bytes}
            case "cpu":
                return {"s": time.process_time()}
        raise ValueError(f"unknown command: {question}")


async def run_server(way: str, case: Case, address: str) -> None:
    """Run the side that has the array."""
    meter = Meter()
    async with WAYS[way][0](case, address) as (served_at, handed):

        async def measure(arguments: list[str]) -> object:
            match arguments[0]:
                case "address":
                    return {"address": served_at}
                case "handed":
                    return {"at": handed()}
            return meter.answer(arguments[0])

        await answer(measure)


async def run_client(way: str, case: Case, address: str) -> None:
    """Run the side that receives the array."""
    meter = Meter()
    expected = digest(make_rows(case))
    tensor: torch.Tensor | None = None
    async with WAYS[way][1](address) as get:

        async def measure(arguments: list[str]) -> object:
            nonlocal tensor
            match arguments[0]:
                case "warm":
                    await get(case.num_tokens // 16)
                    return {}
                case "get":
                    tensor = await get(case.num_tokens)
                    return {"at": time.monotonic()}
                case "check":
                    found, tensor = tensor, None
                    is_good = found is not None and found.numpy().flags.writeable and digest(found.numpy()) == expected
                    return {"is_good": is_good}
            return meter.answer(arguments[0])

        await answer(measure)


def digest(rows: npt.NDArray[Any]) -> str:
    """Return a digest of shape, dtype and contents."""
    return f"{rows.shape} {rows.dtype} {hashlib.sha256(rows.data).hexdigest()}"


if __name__ == "__main__":
    side, name, case_name, where = sys.argv[1:]
    uvloop.run((run_server if side == "server" else run_client)(name, CASES[case_name], where))
