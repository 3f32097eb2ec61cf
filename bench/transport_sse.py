"""The server that `bench.transport` compares: a synthetic engine behind Starlette, uvicorn, uvloop and httptools.

    python -m bench.transport_sse ENGINE_ARGS

The program prints its port. orjson encodes the events. `/inference/v1/generate` answers with one event for each token.
An event has the fields that vLLM's route of the same name writes, in the same order. It also has `weight_version`, like
each chunk of rollbus.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from bench.ways import write
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.protocol.stream.engine_step import TokenBatch
from rollbus.schemas.chunk import FinishReason
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

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


async def serve(engine_args: dict[str, object]) -> None:
    """Serve until terminated."""
    engine = SyntheticEngine(SyntheticConfig.from_args(engine_args))
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
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(json.loads(sys.argv[1])))
