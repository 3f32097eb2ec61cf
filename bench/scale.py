"""Measures the CPU and memory of a request as fleets and queues grow. They should not depend on the size.

    python -m bench.scale [--parts fleet models backlog] [--requests 800] [--queued 100000] [--rounds 2] [--json FILE]
                          [--plot FILE.svg]

Engines are synthetic. Server, workers and clients are separate processes, so that the bench can measure the CPU seconds
and the memory of each side. Other work on the machine changes CPU seconds little. The part `fleet` is an exception: it
subtracts the cost of an idle fleet for the same time, so it needs the whole machine. Parts:

- `fleet`: the same load, 4,000 tokens per second, on 1 to 64 workers, on 1 to 64 clients, and on both. Clients stream:
  each step is sent when it is complete. The cost of an idle fleet (`idle`, CPU ms per second) is measured first. It is
  not part of the cost of a request.
- `models`: the cost of a token with the routed experts of real models, from 4 workers to one client.
- `backlog`: one client queues 100,000 requests in front of paused workers, and then the workers serve them. Then the
  same number passes while 10,000 of them wait at any time. Figures are for slices: `at` is the number of requests that
  were queued or done at the end of a slice.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.report import Report, add_arguments
from bench.scale_fleet import Fleet, Used, started_fleet
from rollbus.bus.client.dispatch import ORPHAN_AGE_S
from rollbus.frontend.cli.tables import spreads
from rollbus.workers.engines.synthetic.config import SyntheticConfig

SIZES: Final = (1, 4, 16, 64)
SHAPES: Final = tuple(
    dict.fromkeys([*((n, 1) for n in SIZES), *((1, n) for n in SIZES), *((n, n) for n in SIZES)]),
)
"""Numbers of workers and clients: more workers, more clients, or more of both."""
NUM_TOKENS: Final = 16
SLOTS: Final = 16
STEP_S: Final = 0.004
"""Seconds of a step with one worker. With n workers a step takes n times as long, so that all fleets generate 4,000
tokens per second."""
IDLE_S: Final = 2.0

MODEL_WORKERS: Final = 4
MODEL_SLOTS: Final = 64
MODEL_TOKENS: Final = 256
MODEL_STEP_S: Final = 0.01
"""Seconds of a step. All workers generate 25,600 tokens per second. Cores are busy, but no two steps merge because of a
lack of CPU."""
MODELS: Final = {
    "no routing": SyntheticConfig(max_num_seqs=MODEL_SLOTS, step_s=MODEL_STEP_S, num_experts=0),
    "30B-A3B": SyntheticConfig(max_num_seqs=MODEL_SLOTS, step_s=MODEL_STEP_S, num_layers=48, top_k=8, num_experts=128),
    "1T-A32B": SyntheticConfig(max_num_seqs=MODEL_SLOTS, step_s=MODEL_STEP_S, num_layers=61, top_k=8, num_experts=384),
}
"""Models by the shape of their routed experts: 0, 384 and 976 bytes per token."""

BACKLOG_WORKERS: Final = 4
BACKLOG_SLOTS: Final = 32
BACKLOG_TOKENS: Final = 4
"""Tokens of a request. They are few, because the part measures the cost of requests, not of tokens."""
NUM_SLICES: Final = 10
PASSING: Final = 10
"""One of this number of passing requests is in flight at any time."""
POLL_S: Final = 0.1
MEGABYTE: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Work:
    """Resources that a fleet used for a number of requests."""

    used: Used
    num_requests: int
    num_frames: int

    @property
    def frames(self) -> float:
        """Frames that clients received per request, including heartbeats."""
        return self.num_frames / self.num_requests


async def idle(fleet: Fleet) -> Used:
    """Return the resources that an idle fleet uses."""
    before = fleet.used()
    await asyncio.sleep(IDLE_S)
    return fleet.used().since(before)


async def work(fleet: Fleet, num_requests: int, num_tokens: int, max_in_flight: int, *, streams: bool = False) -> Work:
    """Return the resources that the fleet uses while each client completes `num_requests` requests."""
    counts, before = await fleet.counts(), fleet.used()
    await fleet.begin(num_requests, num_tokens, max_in_flight, streams=streams)
    await fleet.finish()
    used, now = fleet.used().since(before), await fleet.counts()
    return Work(used, now.done - counts.done, now.frames - counts.frames)


def cost(used: Used, count: float, name: str = "{}_ms") -> dict[str, float]:
    """Return the CPU milliseconds of each side divided by `count`."""
    return {name.format(side): 1000 * one.cpu_s / count for side, one in used.sides.items()}


def memory(used: Used) -> dict[str, float]:
    """Return the megabytes of each side in all its processes."""
    return {f"{side}_mb": one.rss_bytes / MEGABYTE for side, one in used.sides.items()}


# The parts


async def measure_fleets(report: Report, args: argparse.Namespace) -> None:
    """Measure the same load with fleets of several sizes."""
    for num_workers, num_clients in SHAPES:
        engine = SyntheticConfig(max_num_seqs=SLOTS, step_s=STEP_S * num_workers)
        # Load of each client. The requests in flight are half as many again as the slots, so that some requests wait.
        load = max(args.requests // num_clients, 1), NUM_TOKENS, max(3 * num_workers * SLOTS // (2 * num_clients), 2)
        async with started_fleet(num_workers, num_clients, engine) as fleet:
            # This opens the links, which an idle fleet keeps open.
            await work(fleet, *load, streams=True)
            rounds = [of_fleet(await idle(fleet), await work(fleet, *load, streams=True)) for _ in range(args.rounds)]
            used = fleet.used()
        report.add(part="fleet", workers=num_workers, clients=num_clients, **spreads(rounds), **memory(used))


def of_fleet(resting: Used, working: Work) -> dict[str, float]:
    """Return the figures of one round.

    The cost of an idle fleet for the same time is subtracted from the cost of requests.
    """
    idle_s = working.used.at_s / resting.at_s
    at_work, at_rest = cost(working.used, working.num_requests), cost(resting, working.num_requests)
    net = {name: at_work[name] - at_rest[name] * idle_s for name in at_work}
    return {**net, "frames": working.frames, **cost(resting, resting.at_s, "{}_idle")}


async def measure_models(report: Report, args: argparse.Namespace) -> None:
    """Measure the cost of 1,000 tokens with each model's routed experts, including those of the short prompts."""
    slots = MODEL_WORKERS * MODEL_SLOTS
    for model, engine in MODELS.items():
        async with started_fleet(MODEL_WORKERS, 1, engine) as fleet:
            await work(fleet, slots, NUM_TOKENS, slots)
            done = [await work(fleet, slots, MODEL_TOKENS, slots) for _ in range(args.rounds)]
            used = fleet.used()
        rounds = [{**cost(one.used, one.num_requests * MODEL_TOKENS / 1000), "frames": one.frames} for one in done]
        report.add(part=model, workers=MODEL_WORKERS, clients=1, **spreads(rounds), **memory(used))


async def measure_backlog(report: Report, args: argparse.Namespace) -> None:
    """Measure a queue that fills, waits and empties. Then measure a queue through which as many requests pass."""
    engine = SyntheticConfig(max_num_seqs=BACKLOG_SLOTS)
    total = args.queued
    async with started_fleet(BACKLOG_WORKERS, 1, engine) as fleet, fleet.wide_queue(2 * total) as queue:
        await work(fleet, BACKLOG_WORKERS * BACKLOG_SLOTS, BACKLOG_TOKENS, BACKLOG_WORKERS * BACKLOG_SLOTS)
        done = (await fleet.counts()).done

        async def num_done() -> int:
            return (await fleet.counts()).done - done

        await fleet.pause()
        slices = Slices(report, fleet, total)
        await slices.follow("queueing", queue.num_waiting, lambda: fleet.begin(total, BACKLOG_TOKENS, total))
        # After this time, clients ask the queue whether their requests still wait.
        await asyncio.sleep(ORPHAN_AGE_S)
        resting = await idle(fleet)
        report.add(part="waiting", at=total, **cost(resting, resting.at_s, "{}_idle"), **memory(resting))
        await slices.follow("draining", num_done, fleet.resume)
        await fleet.finish()
        done += total
        await slices.follow("passing", num_done, lambda: fleet.begin(total, BACKLOG_TOKENS, total // PASSING))
        await fleet.finish()


class Slices:
    """Reports the cost of each slice of many requests.

    Args:
        total: number of requests in all `NUM_SLICES` slices.
    """

    def __init__(self, report: Report, fleet: Fleet, total: int) -> None:
        self._report, self._fleet, self._total = report, fleet, total

    async def follow(
        self, part: str, reached: Callable[[], Awaitable[int]], begin: Callable[[], Awaitable[object]]
    ) -> None:
        """Call `begin`, then report each slice until `reached` has counted all requests."""
        before, last = self._fleet.used(), 0
        await begin()
        while last < self._total:
            await asyncio.sleep(POLL_S)
            at = await reached()
            if at >= min(last + self._total // NUM_SLICES, self._total):
                now = self._fleet.used()
                self._report.add(part=part, at=at, **cost(now.since(before), at - last), **memory(now))
                before, last = now, at


PARTS = {"fleet": measure_fleets, "models": measure_models, "backlog": measure_backlog}
"""The functions that measure the parts, by name."""


async def measure(report: Report, args: argparse.Namespace) -> None:
    """Measure all selected parts."""
    for part in args.parts:
        await PARTS[part](report, args)


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description="Measure requests as fleets grow.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=800, help="requests of the part fleet (default: %(default)s)")
    parser.add_argument(
        "--queued", type=int, default=100_000, help="requests of the part backlog (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, help="SVG file for the figures of fleet and backlog (default: no file)")
    add_arguments(parser, rounds=2)
    args = parser.parse_args()
    report = Report("scale")
    asyncio.run(measure(report, args))
    report.finish(args.json)
    if args.plot is not None:
        from bench.scale_plot import plot

        plot(report.rows, args.plot)


if __name__ == "__main__":
    main()
