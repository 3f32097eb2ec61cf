"""vLLM's own server, and updates of its weights from a disk over HTTP, for `bench.weights`.

`/update_weights` of vLLM 0.30 receives weights only through NCCL and CUDA memory. `reload_weights` by
`/collective_rpc`, between `/pause` and `/resume`, loads a folder. It compares no data, computes no canary, and reports
no version. On a CPU it keeps the old output projection of models with tied embeddings, which rollbus packs again.
"""

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.real_engine_ways import until_ready

MAX_TOKENS = 400


class Peer:
    """One server with requests in flight.

    Args:
        session: session with the address of the server.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._serials = itertools.count()

    async def update(self, folder: Path) -> float:
        """Load a folder while requests wait. Return the seconds for which they waited."""
        started = time.monotonic()
        await self._post("/pause?mode=keep")
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self._post("/resume")
        return time.monotonic() - started

    async def stream(self) -> None:
        """Stream one request after the other until cancelled."""
        while True:
            sampling = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            body = {"token_ids": [next(self._serials) % 500] * 16, "sampling_params": sampling, "stream": True}
            async with self._session.post("/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                async for _ in response.content:
                    pass

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        async with self._session.post(path, json=body) as response:
            response.raise_for_status()
            await response.read()


@asynccontextmanager
async def peers(model: Path, engine_args: Mapping[str, Any], count: int, num_streams: int) -> AsyncIterator[list[Peer]]:
    """Run servers on this machine while the body runs, each with `num_streams` requests in flight."""
    options = [
        f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
        for name, value in engine_args.items()
    ]
    servers: list[asyncio.subprocess.Process] = []
    sessions: list[aiohttp.ClientSession] = []
    try:
        for number in range(count):
            port = _free_port()
            servers.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--tokens-only", "--model", model),
                    *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "error"),
                    *("--disable-log-stats", *options),
                    stdout=asyncio.subprocess.DEVNULL,
                    env=os.environ | own_cores(number, count) | {"VLLM_SERVER_DEV_MODE": "1"},
                )
            )
            sessions.append(_session(f"http://127.0.0.1:{port}"))
        for session, server in zip(sessions, servers, strict=True):
            await until_ready(session, server)
        found = [Peer(session) for session in sessions]
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(peer.stream()) for peer in found for _ in range(num_streams)]
            yield found
            for stream in streams:
                stream.cancel()
    finally:
        for session in sessions:
            await session.close()
        for server in servers:
            server.terminate()
            await server.wait()


def own_cores(number: int, count: int) -> dict[str, str]:
    """Return the environment of one of several engines: separate cores, with some left for other processes."""
    share = (os.cpu_count() or 1) // (count + 1)
    cores = range(number * share, (number + 1) * share)
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores else {}


def _session(url: str) -> aiohttp.ClientSession:
    # Use a new connection for each request. The server may close an idle connection just when a request reuses it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
