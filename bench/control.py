"""Measures how fast a fleet of synthetic workers answers commands, and what an idle fleet costs.

    python -m bench.control [--workers 1 10 100 1000] [--processes 2] [--rounds 5] [--json FILE]

For each number of workers, the bench starts a fleet with many workers in each process and no requests in flight. Then
each round pauses, resumes and flushes all workers. Times are from the command to the receipt of the acks at the client:
until all workers have sent `accepted`, until half of them have applied the command, and until all have applied it.
Workers in one process answer one after the other, on cores that the server and the client need too. So the time of the
last worker includes the times of all others. In the idle seconds before, all workers publish presence, and the client
receives it. A worker counts as lost if it has disappeared or has another incarnation at the end.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import rollbus
from bench.processes import Way, own_process
from bench.report import Report, program, take_turns
from bench.ways import cpu_by_kind
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import percentile, spreads
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.options import arg

START_TIMEOUT_S = 180.0
"""Seconds until all workers must serve, on a small machine."""
IDLE_S = 10.0
"""Idle seconds. In this time every worker publishes presence ten times and reads its desired state twice."""


async def ack_times(command: Callable[..., Awaitable[object]]) -> dict[str, float]:
    """Run a command. Return the milliseconds until its acks."""
    ms: dict[AckStatus, list[float]] = defaultdict(list)
    started = time.perf_counter()

    def add(ack: Ack) -> None:
        ms[ack.status].append(1000 * (time.perf_counter() - started))

    await command(on_ack=add)
    return {
        "accepted_last_ms": max(ms[AckStatus.ACCEPTED]),
        "applied_half_ms": percentile(ms[AckStatus.APPLIED], 50),
        "applied_last_ms": max(ms[AckStatus.APPLIED]),
    }


@asynccontextmanager
async def fleet_of(url: str, num_workers: int, num_processes: int) -> AsyncIterator[tuple[rollbus.Client, list[Way]]]:
    """Start the workers. Yield a client that sees all of them, and their processes."""
    fleet = f"bench-{num_workers}"
    async with AsyncExitStack() as stack:
        processes = []
        for i in range(min(num_processes, num_workers)):
            count = num_workers // num_processes + (i < num_workers % num_processes)
            args = (url, fleet, f"p{i}-w", count)
            processes.append(await stack.enter_async_context(own_process(f"process {i}", "processes:workers", *args)))
        rb = await stack.enter_async_context(rollbus.connect(url, fleet=fleet))
        await rb.fleet.wait_for_workers(num_workers, timeout_s=START_TIMEOUT_S)
        yield rb, processes


async def measure(report: Report, server: EmbeddedServer, num_workers: int, num_processes: int, rounds: int) -> None:
    """Add the rows of one fleet."""
    async with fleet_of(server.url, num_workers, num_processes) as (rb, processes):
        lives = lives_in(rb)
        sides = {"workers": [way.pid for way in processes], "server": [server.pid], "client": [os.getpid()]}
        before, started = cpu_by_kind(sides), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        after, seconds = cpu_by_kind(sides), time.perf_counter() - started
        cores = {f"{side}_cores": (after[side] - before[side]) / seconds for side in sides}
        commands: list[Callable[..., Awaitable[object]]] = [rb.fleet.pause, rb.fleet.resume, rb.fleet.flush_cache]
        # The first round does not count, because it creates the bucket of the desired state and other data.
        found = await take_turns(rounds + 1, commands, ack_times)
        lost = len(lives - lives_in(rb))
        report.add(workers=num_workers, command="none", **cores, lost=lost)
        for command, figures in found.items():
            report.add(workers=num_workers, command=command.__name__, **spreads(figures[1:]))


def lives_in(rb: rollbus.Client) -> set[tuple[str, str]]:
    """Return the worker id and incarnation of each live worker."""
    return {(worker.worker, worker.incarnation) for worker in rb.fleet.workers}


async def run(report: Report, counts: Sequence[int], num_processes: int, rounds: int) -> None:
    """Measure one fleet after another, on one server."""
    async with EmbeddedServer() as server:
        for num_workers in counts:
            await measure(report, server, num_workers, num_processes, rounds)


if __name__ == "__main__":
    program(
        "control",
        "Measure how fast workers answer commands.",
        lambda args, report: asyncio.run(run(report, args.workers, args.processes, args.rounds)),
        arg("--workers", None, "", type=int, nargs="+", default=[1, 10, 100, 1000]),
        arg("--processes", None, "number of processes for the workers (default: %(default)s)", type=int, default=2),
    )
