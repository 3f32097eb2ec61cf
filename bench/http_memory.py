"""Measures how much the HTTP service grows while it answers a request with many megabytes of routed experts.

    python -m bench.http_memory [--megabytes 16] [--rounds 5] [--json FILE]

The service has its own process. Its peak is Linux's `VmHWM`. The other process has the worker with a synthetic engine,
and the client, which reads the answer without storing it. The bench prints the growth for a whole answer and for a
streamed answer, and the size of the answer. The routed experts have the width of a model with 48 layers and 8 of 256
experts for each token.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import numpy as np

import rollbus
from bench.processes import FLEET, program_process, running_workers
from bench.report import Report, peak_bytes, program, reset_peak, resident_bytes, take_turns
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.options import arg
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

MEGABYTE = 1024 * 1024
NUM_LAYERS, TOP_K = 48, 8
ROW_BYTES = NUM_LAYERS * TOP_K
NUM_TOKENS = 256
"""Generated tokens. The other rows belong to the prompt, as in the last turns of a long rollout."""
WARM_UP_ROWS = 1000


@asynccontextmanager
async def running_worker(url: str) -> AsyncIterator[None]:
    """Run a worker with wide routed experts."""
    config = SyntheticConfig(num_layers=NUM_LAYERS, top_k=TOP_K, num_experts=256, max_model_len=4_194_304)
    worker = Worker(WorkerConfig(nats_url=url, fleet=FLEET, model="m"), SyntheticEngine(config))
    async with running_workers(worker):
        async with rollbus.connect(url) as rb:
            await rb.fleet.wait_for_workers()
        yield


@asynccontextmanager
async def running_service(url: str, *options: str) -> AsyncIterator[tuple[int, str]]:
    """Start the service as users start it. Yield its process id and address."""
    command = ("rollbus.frontend.cli", "frontend", "--nats", url, "--http", "127.0.0.1:0", "--json", *options)
    async with program_process(*command, stdout=asyncio.subprocess.PIPE) as process:
        if process.stdout is None:
            raise RuntimeError("the process was started without a pipe")
        yield process.pid, json.loads(await process.stdout.readline())["http"]


async def ask(client: httpx.AsyncClient, num_rows: int, *, stream: bool) -> int:
    """Send a request and read the answer. Return the size of the answer."""
    prompt = np.arange(num_rows - NUM_TOKENS + 1) % 1000 + 10
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": prompt.tolist(), "sampling_params": params, "stream": stream}
    size = 0
    async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            size += len(part)
    return size


async def measure(url: str, num_rows: int, *, stream: bool) -> dict[str, float]:
    """Return the MiB of the answer, and the maximum growth in MiB of a service that has just started."""
    # Use a new service each time. Freed memory stays with the process and would hide later growth.
    async with running_service(url) as (process, address), httpx.AsyncClient(base_url=address, timeout=600) as client:
        # Do not count memory that the first request allocates once.
        await ask(client, WARM_UP_ROWS, stream=stream)
        reset_peak(process)
        before = resident_bytes(process)
        size = await ask(client, num_rows, stream=stream)
        grown = peak_bytes(process) - before
    return {"answer_mib": size / MEGABYTE, "grown_mib": grown / MEGABYTE}


async def run(megabytes: int, rounds: int, report: Report) -> None:
    """Start everything, measure and print."""
    num_rows = megabytes * MEGABYTE // ROW_BYTES
    async with EmbeddedServer() as server, running_worker(server.url):
        found = await take_turns(rounds, [False, True], lambda stream: measure(server.url, num_rows, stream=stream))
    for stream, figures in found.items():
        report.add(answer="streamed" if stream else "at once", routing_mib=megabytes, **spreads(figures))


if __name__ == "__main__":
    program(
        "http_memory",
        "Measure the memory of the HTTP service.",
        lambda args, report: asyncio.run(run(args.megabytes, args.rounds, report)),
        arg("--megabytes", None, "MiB of routed experts in the answer (default: %(default)s)", type=int, default=16),
    )
