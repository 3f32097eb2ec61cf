"""By how much the HTTP service grows while it answers one request with many megabytes of routing.

    python -m bench.http_memory [--megabytes 16]

The service is a process of its own, whose peak is Linux's `VmHWM`; the worker, on a synthetic engine, and the client,
which reads the answer without keeping it, are in another. Prints the growth for an answer at once and for a streamed
one, and the answer's size. Routing is as wide as that of a model with 48 layers and 8 experts of 256 for each token.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np

import bus
from bus.embedded import EmbeddedServer
from workers.config import WorkerConfig
from workers.engines.synthetic import SyntheticConfig, SyntheticEngine
from workers.worker import Worker

MEGABYTE = 1024 * 1024
NUM_LAYERS, TOP_K = 48, 8
ROW_BYTES = NUM_LAYERS * TOP_K
NUM_TOKENS = 256
"""Generated; the rest of the rows are the prompt's, as in the last turns of a long rollout."""
WARM_UP_ROWS = 1000


@asynccontextmanager
async def running_worker(url: str) -> AsyncIterator[None]:
    """A worker with wide routing."""
    config = SyntheticConfig(num_layers=NUM_LAYERS, top_k=TOP_K, num_experts=256, max_model_len=4_194_304)
    worker = Worker(WorkerConfig(nats_url=url, fleet="bench", model="m"), SyntheticEngine(config))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        async with bus.connect(url, fleet="bench") as rb:
            await rb.fleet.wait_for_workers()
        try:
            yield
        finally:
            worker.stop()


@asynccontextmanager
async def running_service(url: str) -> AsyncIterator[tuple[int, str]]:
    """The service as users start it; its process id and address."""
    options = ["--nats", url, "--fleet", "bench", "--http", "127.0.0.1:0", "--json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "frontend.cli", "frontend", *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        if process.stdout is None:
            raise RuntimeError("no pipe was opened")
        yield process.pid, json.loads(await process.stdout.readline())["http"]
    finally:
        process.terminate()
        await process.wait()


async def ask(client: httpx.AsyncClient, num_rows: int, *, stream: bool) -> int:
    """Have a request answered; returns the size of the answer."""
    prompt = np.arange(num_rows - NUM_TOKENS + 1) % 1000 + 10
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": prompt.tolist(), "sampling_params": params, "stream": stream}
    size = 0
    async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            size += len(part)
    return size


async def growth(client: httpx.AsyncClient, process: int, num_rows: int, *, stream: bool) -> tuple[int, int]:
    """By how many bytes the service grows at most, and the size of its answer."""
    reset_peak(process)
    before = status_bytes(process, "VmRSS")
    size = await ask(client, num_rows, stream=stream)
    return status_bytes(process, "VmHWM") - before, size


def reset_peak(process: int) -> None:
    """From here on, the high-water mark is that of now."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def status_bytes(process: int, field: str) -> int:
    """What Linux says of a process's memory."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/{process}/status has no {field}")


async def run(args: argparse.Namespace) -> None:
    """Start everything, measure, print."""
    num_rows = args.megabytes * MEGABYTE // ROW_BYTES
    async with EmbeddedServer() as server, running_worker(server.url):
        for stream in (False, True):
            # One of its own for each: memory that was freed is not given back, and would hide what comes after.
            async with (
                running_service(server.url) as (process, url),
                httpx.AsyncClient(base_url=url, timeout=600) as client,
            ):
                # What is set up once does not belong to the request.
                await ask(client, WARM_UP_ROWS, stream=stream)
                grown, size = await growth(client, process, num_rows, stream=stream)
            sys.stdout.write(
                f"{'stream' if stream else 'at once':<8} {args.megabytes} MB of routing: the service grew by "
                f"{grown / MEGABYTE:.0f} MB, answer of {size / MEGABYTE:.0f} MB\n"
            )
            sys.stdout.flush()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.http_memory", description="Memory of the HTTP service.")
    parser.add_argument("--megabytes", type=int, default=16)
    args = parser.parse_args()
    sys.stdout.write(f"{' '.join(['python -m bench.http_memory', *sys.argv[1:]])}\n")
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
