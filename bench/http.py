"""Measures the HTTP service beside other HTTP servers and beside the bus: tokens per second, first tokens and CPU.

    python -m bench.http [--engines real synthetic] [--dynamo PYTHON] [--loads 64x64 ...] [--rounds 5] [--json FILE]

A load of 64x16x8 is 64 requests at once, of 16 tokens each, and 8 requests in turn on each connection. With real
engines, the peer is vLLM's own server with the same tiny MoE, at `/v1/completions`. With synthetic engines, it is
Dynamo's frontend with its mocker, at `/v1/chat/completions`. `--dynamo` is the Python of an environment as in
`bench.placement`, which also has aiohttp, msgspec, prometheus-client, pyzmq, transformers, zstandard, certifi,
kubernetes<33, redis<9, tqdm and uvloop. Prompts and answers are token ids on both sides.

`streams` and `whole` are answers over HTTP. `streams-quick` has a client that acknowledges each segment at once
(TCP_QUICKACK), because Dynamo's socket delays small segments until then. `stream_many`, `generate` and `complete_many`
are the ways of the bus, with the same worker. `times_vllm` and `times_dynamo` are tokens per second divided by those of
the peer's same answers in the same round, `times_bus` by those of `stream_many` or `complete_many`. `first_ms` is the
median time from the start of a burst to the first token. CPU is in milliseconds per 1,000 tokens, for all processes
with the engine, the process of the HTTP service, and the client.

All servers have the same client: one connection for each request at once, and httptools. The client keeps the bytes of
the answers and decodes them after the round. It checks the number of tokens. All processes share this machine.
"""

import argparse
import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import orjson

import rollbus
from bench import ways
from bench.http_memory import running_service
from bench.processes import START_S, Way, own_process, program_process, worker_process
from bench.real_engine import ENGINE_ARGS, SETTLE_S
from bench.report import TINY_MOE, Report, program, take_turns
from bench.ways import Prompts, Result, Run, cpu_ms
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.options import arg
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

Piece = tuple[float, bytes]
"""A piece of the body of an answer, and when it arrived."""
MODEL: Final = "tiny"
VOCAB_SIZE: Final = 4096
REAL: Final[dict[str, Any]] = {**ENGINE_ARGS, "enable_return_routed_experts": False}
SYNTHETIC: Final[dict[str, Any]] = {"max_num_seqs": 512, "vocab_size": VOCAB_SIZE, "num_experts": 0}
BUS: Final = {"streams": "stream_many", "streams-quick": "", "whole": "complete_many"}
"""The answers over HTTP, and the way of the bus beside which they are measured; empty: none."""
LIKE: Final = {"stream_many": "streams", "generate": "streams", "complete_many": "whole"}
"""The ways of the bus, and the answers of a peer beside which they are measured."""


class Connection(asyncio.Protocol):
    """A connection that sends one request at a time. It keeps the pieces of the answer."""

    def __init__(self) -> None:
        self.is_quick = False
        self._answered = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the answer."""
        self._parser.feed_data(data)
        if self.is_quick:
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body."""
        self._pieces.append((time.perf_counter(), data))

    def on_message_complete(self) -> None:
        """End the answer."""
        self._answered.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer with an error."""
        if not self._answered.done():
            self._answered.set_exception(error or ConnectionResetError("the server closed the connection"))

    async def post(self, request: bytes) -> Sequence[Piece]:
        """Send a request and return the body of the answer.

        Raises:
            RuntimeError: the answer has another status than 200.
        """
        self._pieces, self._parser = list[Piece](), httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        if (status := await self._answered) != 200:
            raise RuntimeError(f"status {status}: {self._pieces!r}")
        return self._pieces


def make_request(path: str, prompt: list[int], max_tokens: int, *, stream: bool) -> bytes:
    """Return a request for exactly `max_tokens` tokens, at OpenAI's route for prompts or for chats."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "(token-in mode)"}]
        body["nvext"] = {"token_data": prompt, "extra_fields": ["completion_token_ids"]}
    else:
        body |= {"prompt": prompt, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    data = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def read_answers(answers: Iterable[tuple[Result, Sequence[Piece]]]) -> Iterator[Result]:
    """Yield the results with the tokens of their answers."""
    for result, pieces in answers:
        rest = b""
        for at, piece in [*pieces, (pieces[-1][0], b"\n\n")]:
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if ids := token_ids(event.removeprefix(b"data: ")):
                    result.first_s = result.first_s or at - result.started
                    result.token_ids += ids
        yield result


def token_ids(body: bytes) -> list[int]:
    """Return the token ids of an answer, or of an event of it."""
    answer = orjson.loads(body) if body.startswith(b"{") else {"choices": [{}]}
    chat = (answer.get("nvext") or {}).get("completion_token_ids")
    return chat or answer["choices"][0].get("token_ids") or []


def over_http(url: str, path: str) -> dict[str, Run]:
    """Return the runs that send their requests to a server, on connections that stay open."""
    free: list[Connection] = []

    async def run(prompts: Prompts, max_tokens: int, in_flight: int, *, way: str) -> Iterable[Result]:
        address = urlsplit(url)
        free[:] = [one for one in free if not one.transport.is_closing()]
        while len(free) < in_flight:
            loop = asyncio.get_running_loop()
            free.append((await loop.create_connection(Connection, str(address.hostname), address.port or 80))[1])
        answers: list[tuple[Result, Sequence[Piece]]] = []

        async def one(prompt: list[int], max_tokens: int, result: Result) -> None:
            connection = free.pop()
            connection.is_quick = way == "streams-quick"
            request = make_request(path, prompt, max_tokens, stream=way != "whole")
            answers.append((result, await connection.post(request)))
            free.append(connection)

        await ways.at_once(one)(prompts, max_tokens, in_flight)
        return read_answers(answers)

    return {way: partial(run, way=way) for way in BUS}


@asynccontextmanager
async def rollbus_side(folder: str, path: str, engine: str) -> AsyncIterator[dict[str, Run]]:
    """Run a bus with a worker and the HTTP service. Yield the runs over HTTP and those of the bus."""
    kind, engine_args = engine.split()
    options = ("--engine", "synthetic") if kind == "synthetic" else ("--model", folder)
    async with (
        EmbeddedServer() as server,
        worker_process(server.url, *options, "--served-model-name", MODEL, "--engine-args", engine_args),
        rollbus.connect(server.url) as rb,
        running_service(server.url, "--tokenizer", folder) as (_, url),
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_S)
        many = {
            name: ways.in_one_loop(rb, streams="stream" in name, routing=False)
            for name in ("stream_many", "complete_many")
        }
        yield {"generate": ways.in_loops(rb, routing=False), **many, **over_http(url, path)}


@asynccontextmanager
async def dynamo_side(folder: str, path: str, python: str) -> AsyncIterator[dict[str, Run]]:
    """Run Dynamo's mocker and frontend. Both listen on loopback only."""
    port, planes = ways.free_port(), ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE", "SYSTEM", "HTTP")
    async with EmbeddedServer() as server:
        env = {f"DYN_{plane}_HOST": "127.0.0.1" for plane in planes} | {"DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
        env |= {"DYN_FILE_KV": f"{folder}/kv", "NATS_SERVER": server.url}
        common = "--discovery-backend file --request-plane tcp --response-plane tcp --event-plane nats"
        mocker = f"{common} --model-path {folder} --model-name {MODEL} --speedup-ratio 1000000 --max-num-seqs 512"
        mocker += " --num-gpu-blocks-override 16384 --num-workers 1"
        frontend = f"{common} --http-port {port} --router-mode round-robin"
        # It writes a line for each request at any level.
        start = partial(program_process, env=env, python=python, stderr=asyncio.subprocess.DEVNULL)
        async with (
            start("dynamo.mocker", *mocker.split()),
            start("dynamo.frontend", *frontend.split()) as service,
        ):
            yield over_http(await ways.wait_until_served(port, service, MODEL), path)


@asynccontextmanager
async def vllm_side(folder: str, path: str, _engine: str) -> AsyncIterator[dict[str, Run]]:
    """Run vLLM's own server."""
    engine_args = {name: value for name, value in REAL.items() if value} | {"served_model_name": MODEL}
    # Connections stay open while the others have their turns. The default is 5 seconds.
    async with ways.vllm_server(folder, engine_args, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}) as url:
        yield over_http(url, path)


SIDES: Final = {"rollbus": rollbus_side, "vllm": vllm_side, "dynamo": dynamo_side}


@asynccontextmanager
async def one_run(runs: AbstractAsyncContextManager[Mapping[str, Run]]) -> AsyncIterator[Run]:
    """Yield a run whose last argument chooses one of these."""
    async with runs as named:
        yield lambda prompts, tokens, in_flight, way: named[way]([2 * each for each in prompts], tokens, int(in_flight))


async def side(name: str, *args: str) -> None:
    """Serve one side in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    await ways.serve(one_run(SIDES[name](*args)))


def make_model(folder: Path) -> None:
    """Write what a mocker and the service need of a model: its configuration and a tokenizer."""
    model = {"type": "WordLevel", "unk_token": "t0", "vocab": {f"t{number}": number for number in range(VOCAB_SIZE)}}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    sizes |= {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 1, **sizes}
    template = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    for name, content in {"tokenizer": tokenizer, "tokenizer_config": template, "config": config}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


async def turn(key: tuple[str, str], *, sides: Mapping[str, Way], load: Sequence[int]) -> dict[str, float]:
    """Return the figures of one round of one way of a side."""
    (name, way), (in_flight, tokens, each) = key, load
    await asyncio.sleep(SETTLE_S)
    answer = await ways.ask(sides[name], (in_flight * each, tokens), in_flight, way)
    kinds = {"all": None, "http": "worker" if name == "vllm" else "http", "client": "client"}
    figures = {f"{shown}_cpu_ms": cpu_ms(answer, kind) for shown, kind in kinds.items()}
    figures |= {"first_ms": 1000 * median(answer["first_s"])} if each == 1 else {}
    return {"tokens_per_s": ways.rate(answer), "requests_per_s": ways.rate(answer) / tokens, **figures}


async def measure(args: argparse.Namespace, report: Report, engine: str, stack: AsyncExitStack) -> None:
    """Measure all loads with one kind of engine."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if engine == "real":
        peers, path, folder, options = {"vllm": ""}, "/v1/completions", make_tiny_moe(TINY_MOE), REAL
    else:
        peers, path, options = {"dynamo": str(args.dynamo)} if args.dynamo else {}, "/v1/chat/completions", SYNTHETIC
        make_model(folder)
    sides = {}
    for name, details in {"rollbus": f"{engine} {json.dumps(options, separators=(',', ':'))}", **peers}.items():
        sides[name] = await stack.enter_async_context(own_process(name, "http:side", name, folder, path, details))
    over = BUS if args.dynamo and engine == "synthetic" else ("streams", "whole")
    turns = [(name, way) for way in [*over, *LIKE] for name in sides if name == "rollbus" or way in over]
    for load in args.loads:
        one = partial(turn, sides=sides, load=[*map(int, load.split("x")), 1][:3])
        await take_turns(1, turns, one)
        found = await take_turns(args.rounds, turns, one)
        for (name, way), rounds in found.items():
            beside = {"bus": ("rollbus", BUS.get(way, "")), **{peer: (peer, LIKE.get(way, way)) for peer in peers}}
            for other, key in beside.items() if name == "rollbus" else ():
                for own, its in zip(rounds, found.get(key, ()), strict=False):
                    own[f"times_{other}"] = own["tokens_per_s"] / its["tokens_per_s"]
            report.add(engine=engine, server=name, way=way, load=load, **spreads(rounds))


async def run(args: argparse.Namespace, report: Report) -> None:
    """Measure with each kind of engine."""
    for engine in args.engines:
        async with AsyncExitStack() as stack:
            await measure(args, report, engine, stack)


if __name__ == "__main__":
    program(
        "http",
        "Measure the HTTP service beside other servers and beside the bus.",
        lambda args, report: asyncio.run(run(args, report)),
        arg("--engines", ("real", "synthetic"), "", nargs="+", default=["real", "synthetic"]),
        arg("--dynamo", None, "Python executable of an environment with Dynamo (default: no Dynamo)", type=Path),
        arg("--loads", "LOAD", "", nargs="+", default=["64x64", "256x128", "64x16"]),
    )
