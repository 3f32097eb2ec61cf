"""The ways of a request's routed experts from the engine's array to a writable tensor that `bench.routing` compares.

Each side is a separate process. The ways:

- `rollbus`: a worker and `Client.complete`;
- `json`: the answer of vLLM's `/inference/v1/generate`. The server writes it as vLLM does: the bytes of a numpy file in
  base64 by pybase64, in JSON by the standard library. The client reads it as vLLM's documentation describes;
- `orjson`: the same with orjson, and pybase64 on both sides;
- `bare`: only sockets through the same nats-server and a thread at each end.

A server answers `address` and `handed`, the time at which the engine output its array. A client answers `get`, the time
at which the tensor was complete, and `check`, which is true if the tensor is correct. Both answer `idle`, after which
memory and CPU time count, `grown` and `cpu`.

An engine with precomputed routed experts, so that a bench measures only their transport to the client.

Moves rows through nats-server with bare sockets. This is the limit for all ways through that server on a machine.

There is no client, no msgpack, no credit, no acknowledgement and no check. A thread writes segments of the array to one
socket. Another thread reads them from a second socket into the memory of the tensor.
"""

import asyncio
import base64
import hashlib
import io
import json
import socket
import time
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlparse

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson
import pybase64
import torch
import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import rollbus
from bench.processes import answer, running_workers
from bench.report import give_back, peak_bytes, reset_peak, resident_bytes
from bench.ways import PATH, vllm_answer
from rollbus.bus.protocol.stream.chunk_writer import SEGMENT_BYTES
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import DTYPES, Rows, dtype_for
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.engine import Engine
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

CLOCK = 2**31
"""Token ids count microseconds below this number, which is half an hour, and then start from 0 again."""


class Case(NamedTuple):
    """The routed experts of one request. All its tokens except one belong to the prompt."""

    num_tokens: int
    """Number of rows: all tokens of prompt and answer except the last."""
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_tokens * self.num_layers * self.top_k * DTYPES[dtype_for(self.num_experts)].itemsize


CASES = {"u1": Case(32_768, 48, 8, 128), "u2": Case(32_768, 61, 8, 384)}
"""Cases by the dtype of their rows: 12.6 MB as in Qwen3-30B-A3B, and 32 MB as in Kimi-K2."""


def make_rows(case: Case) -> Rows:
    """Return u1|u2[num_tokens, num_layers, top_k], the same each time."""
    shape = (case.num_tokens, case.num_layers, case.top_k)
    dtype = DTYPES[dtype_for(case.num_experts)]
    return np.random.default_rng(1).integers(0, case.num_experts, shape, dtype)


def clock_us() -> int:
    """Return the microseconds that token ids count, on the clock that all processes of a machine share."""
    return time.monotonic_ns() // 1000 % CLOCK


class RoutedEngine(SyntheticEngine):
    """A synthetic engine with the rows of a case. Its token ids are the time at which the engine output them.

    No request may be longer than the case.

    Args:
        step_s: seconds between two steps.
        is_fresh: True: each request's rows are a new array, as in a real engine, so that their memory counts. False:
            all rows are views of one array, so that an engine in the process of its worker needs no time for copies.

    Attributes:
        handed_at: time of the output of the last step, on `time.monotonic()`.
    """

    def __init__(self, case: Case, *, step_s: float, is_fresh: bool) -> None:
        super().__init__(SyntheticConfig(num_experts=0, step_s=step_s))
        _, num_layers, top_k, num_experts = case
        routing = RoutedExpertsInfo(
            num_layers=num_layers, top_k=top_k, num_experts=num_experts, dtype=dtype_for(num_experts)
        )
        self.capabilities = replace(self.capabilities, routed_experts=routing, vocab_size=CLOCK)
        self._rows = make_rows(case)
        self._is_fresh = is_fresh
        self._positions: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self.handed_at = 0.0

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Queue a request."""
        self._positions[key], self._prompts[key] = request.routed_experts_prompt_start, request.prompt_len
        await super().add(key, request, kv)

    async def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Yield one batch of output for each step, with its rows."""
        async for made in super().steps():
            steps = split(made)
            for step in steps:
                self._route(step)
            now = clock_us()
            for step in steps:
                step.token_ids[:] = now
            self.handed_at = time.monotonic()
            yield steps

    def _route(self, step: RequestStep) -> None:
        """Add the prompt's rows to the first token, and one row to each further token."""
        if len(step.token_ids):
            start = self._positions[step.key]
            end = max(start + 1, self._prompts[step.key])
            rows = self._rows[start:end]
            step.routed_experts = rows.copy() if self._is_fresh else rows
            step.routed_experts_start = start
            self._positions[step.key] = end
        if step.finish_reason is not None:
            del self._positions[step.key], self._prompts[step.key]


ASK, ROWS = "bench.ask", "bench.rows"
"""Subjects of the number of requested rows, and of their segments."""
OPTIONS = json.dumps({"verbose": False, "pedantic": False})


class Bare:
    """A connection to a NATS server that subscribes to one subject."""

    def __init__(self, address: str, subject: str) -> None:
        url = urlparse(address)
        self.socket = socket.create_connection((url.hostname, url.port))
        self._stream = io.BufferedReader(socket.SocketIO(self.socket, "r"), 64 * 1024)
        self._stream.readline()  # Skip INFO.
        self.socket.sendall(f"CONNECT {OPTIONS}\r\nSUB {subject} 1\r\nPING\r\n".encode())
        while self._stream.readline() != b"PONG\r\n":
            pass

    def close(self) -> None:
        """Close it."""
        self._stream.close()
        self.socket.close()

    def send(self, subject: str, payload: bytes | memoryview) -> None:
        """Publish, and wait until the operating system has accepted all bytes."""
        self.socket.sendall(f"PUB {subject} {len(payload)}\r\n".encode())
        self.socket.sendall(payload)
        self.socket.sendall(b"\r\n")

    def receive(self) -> int:
        """Wait for the first line of the next message and return its size. Return 0 if the connection ended."""
        while line := self._stream.readline():
            if line.startswith(b"MSG"):
                return int(line.split()[-1])
            if line == b"PING\r\n":
                self.socket.sendall(b"PONG\r\n")
        return 0

    def read(self, size: int) -> bytearray:
        """Read a message of this size."""
        data = bytearray(size)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Read a message of the size of `view` into `view`."""
        while len(view):
            view = view[self._stream.readinto(view) :]
        self._stream.read(2)


@asynccontextmanager
async def bare_server(case: Case, address: str) -> AsyncIterator[tuple[str, Callable[[], float]]]:
    """Run the side that has the array."""
    made, handed_at = make_rows(case), 0.0
    connection = await asyncio.to_thread(Bare, address, ASK)

    def serve() -> None:
        nonlocal handed_at
        while size := connection.receive():
            rows = made[: int(connection.read(size))].copy()
            handed_at = time.monotonic()
            connection.send(ROWS, json.dumps({"shape": rows.shape, "dtype": str(rows.dtype)}).encode())
            data = rows.data.cast("B")
            for first in range(0, len(data), SEGMENT_BYTES):
                connection.send(ROWS, data[first : first + SEGMENT_BYTES])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(serve))
        try:
            yield address, lambda: handed_at
        finally:
            # The shutdown ends the read of the thread.
            connection.socket.shutdown(socket.SHUT_RDWR)
    connection.close()


@asynccontextmanager
async def bare_client(address: str) -> AsyncIterator[Callable[[int], Awaitable[torch.Tensor]]]:
    """Run the side that receives the array."""
    connection = await asyncio.to_thread(Bare, address, ROWS)

    def fetch(num_tokens: int) -> torch.Tensor:
        connection.send(ASK, str(num_tokens).encode())
        rows = np.empty(**json.loads(connection.read(connection.receive())))
        view = rows.data.cast("B")
        while len(view):
            size = connection.receive()
            connection.fill(view[:size])
            view = view[size:]
        return torch.from_numpy(rows)

    async def get(num_tokens: int) -> torch.Tensor:
        return await asyncio.to_thread(fetch, num_tokens)

    try:
        yield get
    finally:
        connection.close()


Handed = Callable[[], float]
"""Time of the engine's last output of an array, on `time.monotonic()`."""
Get = Callable[[int], Awaitable[torch.Tensor]]
"""Requests the rows of a prompt with this number of tokens."""


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


def running_worker(engine: Engine, address: str) -> AbstractAsyncContextManager[None]:
    """Run a worker with `engine` while the body runs."""
    return running_workers(Worker(WorkerConfig(nats_url=address, model="routing", prove_reload=False), engine))


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
            return respond(vllm_answer([1], [-1.0], data))

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


async def answer_commands(**commands: Callable[[], Awaitable[object]]) -> None:
    """Answer these commands, and those that measure the memory and CPU time of this process, until stdin ends."""
    idle_bytes = 0

    async def measure(arguments: list[str]) -> object:
        nonlocal idle_bytes
        match arguments[0]:
            case "idle":
                give_back()
                reset_peak()
                idle_bytes = resident_bytes()
                return {}
            case "grown":
                return {"bytes": peak_bytes() - idle_bytes}
            case "cpu":
                return {"s": time.process_time()}
            case command:
                return await commands[command]()

    await answer(measure)


async def run_server(way: str, case: Case, address: str) -> None:
    """Run the side that has the array."""
    async with WAYS[way][0](case, address) as (served_at, handed_at):

        async def where() -> object:
            return {"address": served_at}

        async def handed() -> object:
            return {"at": handed_at()}

        await answer_commands(address=where, handed=handed)


async def run_client(way: str, case: Case, address: str) -> None:
    """Run the side that receives the array."""
    expected = digest(make_rows(case))
    tensor: torch.Tensor | None = None
    async with WAYS[way][1](address) as fetch:

        async def warm() -> object:
            await fetch(case.num_tokens // 16)
            return {}

        async def get() -> object:
            nonlocal tensor
            tensor = await fetch(case.num_tokens)
            return {"at": time.monotonic()}

        async def check() -> object:
            nonlocal tensor
            found, tensor = tensor, None
            is_good = found is not None and found.numpy().flags.writeable and digest(found.numpy()) == expected
            return {"is_good": is_good}

        await answer_commands(warm=warm, get=get, check=check)


def digest(rows: npt.NDArray[Any]) -> str:
    """Return a digest of shape, dtype and contents."""
    return f"{rows.shape} {rows.dtype} {hashlib.sha256(rows.data).hexdigest()}"


async def side(name: str, way: str, case_name: str, where: str) -> None:
    """Run the server or the client of a way in this process."""
    await (run_server if name == "server" else run_client)(way, CASES[case_name], where)
