"""How long a fleet of many workers takes to answer commands: seconds to `accepted` and to `applied`, of each worker.

    python -m bench.control [--workers 200] [--processes 1] [--rounds 10]

Starts a server and the workers, which have synthetic engines and nothing in flight; pauses and resumes all of them in
turn. Prints percentiles over all workers and rounds, as the client sees the answers come. Workers in one process answer
one after another: the last has waited for all others.
"""

import argparse
import asyncio
import math
import os
import platform
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict

import bus
from bus.embedded import EmbeddedServer
from schemas.control import Ack, AckStatus

FLEET = "bench"
START_TIMEOUT_S = 120.0
"""For all workers to serve, on a small machine."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Clock:
    """Seconds from a command to each worker's answers, by command and status."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, AckStatus], list[float]] = defaultdict(list)
        self._started = 0.0

    def start(self) -> None:
        """A command is given."""
        self._started = time.perf_counter()

    def take(self, ack: Ack) -> None:
        """An answer came."""
        if ack.status is not AckStatus.PROGRESS:
            self.seconds[ack.command, ack.status].append(time.perf_counter() - self._started)

    def lines(self) -> list[str]:
        """One line for each command and status."""
        lines = []
        for (command, status), seconds in self.seconds.items():
            seconds.sort()
            values = (seconds[max(math.ceil(part * len(seconds)) - 1, 0)] for part in QUANTILES.values())
            shown = "  ".join(f"{name} {1000 * value:7.1f}" for name, value in zip(QUANTILES, values, strict=True))
            lines.append(f"{command:<8} {status:<9} {len(seconds):>6} answers, ms: {shown}")
        return lines


async def measure(rb: bus.Client, rounds: int) -> Clock:
    """Pause and resume `rounds` times; every worker has to apply each."""
    clock = Clock()
    for _ in range(rounds):
        for command in (rb.fleet.pause, rb.fleet.resume):
            clock.start()
            await command(on_ack=clock.take)
    return clock


async def run(num_workers: int, num_processes: int, rounds: int) -> None:
    """Start a server and the workers, measure, print."""
    async with EmbeddedServer() as server:
        processes: list[Process] = []
        try:
            for i in range(num_processes):
                count = num_workers // num_processes + (i < num_workers % num_processes)
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "bench.many_workers", server.url, FLEET, f"p{i}-w", str(count)),
                        stdin=PIPE,
                    )
                )
            async with bus.connect(server.url, fleet=FLEET) as rb:
                await rb.fleet.wait_for_workers(num_workers, timeout_s=START_TIMEOUT_S)
                await measure(rb, 1)
                clock = await measure(rb, rounds)
            sys.stdout.write("".join(f"{line}\n" for line in clock.lines()))
        finally:
            for process in processes:
                if process.stdin is not None:
                    process.stdin.close()
            for process in processes:
                await process.wait()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.control", description="How quickly commands are answered.")
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    sys.stdout.write(f"{' '.join(['python -m bench.control', *sys.argv[1:]])}\n")
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    asyncio.run(run(args.workers, args.processes, args.rounds))


if __name__ == "__main__":
    main()
