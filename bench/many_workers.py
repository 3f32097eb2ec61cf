"""Runs many workers with synthetic engines in one process: `python -m bench.many_workers URL FLEET PREFIX COUNT`.

The program prints `ready` when the workers have been started, not when they serve. They run until standard input ends,
so they end with the program that started them.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import uvloop

from bench.ways import write
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

LEASE_S = 30.0
"""Seconds of a lease. Many workers share one event loop. On a busy machine, a lease of the usual length would expire
while other workers run."""


@contextlib.asynccontextmanager
async def many_workers(
    url: str, fleet: str, prefix: str, count: int, config: SyntheticConfig | None = None
) -> AsyncIterator[list[Worker]]:
    """Run `count` workers with the name `prefix` and a number while the body runs.

    Args:
        config: configuration of all their engines.
    """
    config = config or SyntheticConfig(max_num_seqs=4)
    workers = [
        Worker(
            WorkerConfig(
                nats_url=url, fleet=fleet, model="synthetic", worker_id=f"{prefix}{i}", lease_s=LEASE_S, listen_s=0.0
            ),
            SyntheticEngine(config),
        )
        for i in range(count)
    ]
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(worker.run(), name="worker")
        try:
            yield workers
        finally:
            for worker in workers:
                worker.stop()


async def _main(url: str, fleet: str, prefix: str, count: str) -> None:
    async with many_workers(url, fleet, prefix, int(count)):
        write("ready")
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:]))
