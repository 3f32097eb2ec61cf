"""Measures the cost of spans for a request: `python -m bench.tracing`.

A client and a worker with the synthetic engine run in this process. The figure is the CPU time of the whole process per
request. The ways take turns, so that other work of the machine affects all of them.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import rollbus
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.nats_server import running_server

WAYS = ("off", "unsampled", "sampled")
REQUESTS = 2000
TOKENS = 8


def provider(way: str) -> Any:
    """Return the value of the option `tracing`. Its spans are discarded.

    The limit of spans per second is lifted for all ways.
    """
    if way == "off":
        return False
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    from rollbus.bus.tracing import otel

    vars(otel).update(MAX_SPANS_PER_S=10**9, BURST=10**9)
    return TracerProvider(sampler=ALWAYS_ON if way == "sampled" else ALWAYS_OFF)


@asynccontextmanager
async def fleet(url: str, way: str) -> AsyncIterator[rollbus.Client]:
    """Run a worker, and a client that has received its presence."""
    config = WorkerConfig(nats_url=url, fleet=f"tracing-{way}", model="m", listen_s=0.0)
    engine, tracing = SyntheticEngine(SyntheticConfig(max_num_seqs=256)), provider(way)
    if way == "off":
        worker, options = Worker(config, engine), {}
    else:
        from rollbus.bus.tracing.spans import make_tracer
        from rollbus.workers.request_spans import RequestSpans

        tracer = make_tracer(tracing, service_name="bench")
        if tracer is None:
            raise SystemExit("OTEL_SDK_DISABLED is set")
        worker = Worker(config, engine, RequestSpans(tracer, worker="w", model="m").export)
        options = {"tracing": tracing}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        async with rollbus.connect(url, fleet=config.fleet, **options) as rb:
            await rb.fleet.wait_for_workers()
            yield rb
        worker.stop()


async def cpu_us(rb: rollbus.Client) -> float:
    """Return the microseconds of CPU for each request of a batch."""
    sampling = rollbus.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    began = time.process_time()
    requests = (rollbus.GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling) for _ in range(REQUESTS))
    async for generation in rb.complete_many(requests, max_in_flight=256):
        if generation.error is not None:
            raise generation.error
    return (time.process_time() - began) / REQUESTS * 1e6


async def run(url: str, ways: Sequence[str], rounds: int) -> None:
    """Print the median of each way."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            async with fleet(url, way) as rb:
                await cpu_us(rb)
                found[way].append(await cpu_us(rb))
    for way, values in found.items():
        figure = f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
        sys.stdout.write(f"{way}: {figure} us of CPU per request\n")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with running_server() as url:
        asyncio.run(run(url, args.ways, args.rounds))


if __name__ == "__main__":
    main()
