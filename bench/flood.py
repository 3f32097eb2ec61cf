"""Measures how long a trainer waits while another trainer floods the queue.

    python -m bench.flood [--flood 20000] [--samples 30] [--json FILE]

One worker has a synthetic engine with 64 requests at once and a step every 5 ms. Alice sends requests of 16 tokens one
after the other. The bench measures the time of each request, first alone, then while Mallory has `--flood` requests of
16 tokens open. `share` is the maximum number of Mallory's requests in the queue; the others wait in Mallory's client.
`waits_behind_s` is the time in which the engine finishes that share, the longest time for which Alice waits.
"""

import asyncio
import json
import time

import uvloop

import rollbus
from bench.processes import START_S, WORKER, bus_request, secure_bus, worker_process
from bench.report import Report, program
from rollbus.bus.queue.streams import QueueLimits
from rollbus.frontend.cli.tables import percentile
from rollbus.schemas.options import arg

TOKENS = 16
STEP_S = 0.005
SLOTS = 64
SETTLE_S = 3.0
"""Seconds until the flood has filled its share of the queue."""


async def times_of(rb: rollbus.Client, samples: int) -> list[float]:
    """Return the seconds of single requests, one after the other."""
    seconds = []
    for _ in range(samples):
        started = time.perf_counter()
        await rb.complete(bus_request([1, 2, 3], TOKENS, routing=False))
        seconds.append(time.perf_counter() - started)
    return seconds


async def flood(rb: rollbus.Client, count: int) -> None:
    """Keep `count` requests open until cancelled."""
    while True:
        requests = [bus_request([7, 8, i], TOKENS, routing=False) for i in range(count)]
        async for _ in rb.complete_many(requests, max_in_flight=count):
            pass


async def run(report: Report, num_flood: int, samples: int) -> None:
    """Measure alone, then beside the flood."""
    engine = json.dumps({"max_num_seqs": SLOTS, "step_s": STEP_S})
    async with (
        secure_bus("alice", "mallory") as bus,
        worker_process(
            *(bus.server.url, "--creds", str(bus.worker), "--worker-id", WORKER),
            *("--engine", "synthetic", "--engine-args", engine),
        ),
        rollbus.connect(bus.server.url, credentials=bus.trainers[0]) as alice,
        rollbus.connect(bus.server.url, credentials=bus.trainers[1]) as mallory,
    ):
        await alice.fleet.wait_for_workers(timeout_s=START_S)
        add(report, "alone", await times_of(alice, samples))
        async with asyncio.TaskGroup() as tasks:
            flooding = tasks.create_task(flood(mallory, num_flood), name="flood")
            await asyncio.sleep(SETTLE_S)
            add(report, f"beside {num_flood:,} requests", await times_of(alice, samples))
            flooding.cancel()


def add(report: Report, case: str, seconds: list[float]) -> None:
    """Add a row with these times."""
    share = QueueLimits().max_per_client
    report.add(
        alice=case,
        p50_s=percentile(seconds, 50),
        p99_s=percentile(seconds, 99),
        share=share,
        waits_behind_s=share * (TOKENS * STEP_S) / SLOTS,
    )


if __name__ == "__main__":
    program(
        "flood",
        "Measure a trainer beside a trainer that floods the queue.",
        lambda args, report: uvloop.run(run(report, args.flood, args.samples)),
        arg("--flood", None, "open requests of the other trainer (default: %(default)s)", type=int, default=20000),
        arg("--samples", None, "number of measured requests (default: %(default)s)", type=int, default=30),
        rounds=1,
    )
