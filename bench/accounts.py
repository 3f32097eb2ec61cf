"""Measures the cost of accounts: the same server with users in accounts by role, and without users.

    python -m bench.accounts [--loads 256x64] [--frames 2000] [--rounds 5] [--json FILE]

Requests: a load of 256x64 is 256 requests at once, of 64 tokens each, from a synthetic engine at its full speed.
Frames: only messages of 64 KiB from a worker's user to a trainer. CPU is in microseconds per request or frame, for
nats-server, the worker, and this program, which is the client. `ratio` is the figure with accounts divided by the
figure without them in the same round.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import uvloop

import rollbus
from bench.processes import FLEET, START_S, WORKER, bus_request, secure_bus, worker_process
from bench.report import Load, Report, cpu_s, parse_loads, program, take_turns
from rollbus.bus.nats.connection import connected, publish, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server
from rollbus.bus.subjects import Subjects
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.options import arg

FRAME = bytes(64 * 1024)
FRAMES_AT_ONCE = 64
"""Number of frames in flight. Their bytes are below the buffer limit of each connection."""
TRAINER = "alice"
ENGINE = ("--engine", "synthetic", "--engine-args", json.dumps({"max_num_seqs": 1024}), "--worker-id", WORKER)


@dataclass(frozen=True, slots=True)
class Side:
    """One server with a worker and a client."""

    rb: rollbus.Client
    worker: Server
    trainer: Server
    pids: Mapping[str, int]


@asynccontextmanager
async def without_users() -> AsyncIterator[Side]:
    """Run a server without users, on which every program has all permissions."""
    async with (
        EmbeddedServer() as server,
        worker_process(server.url, *ENGINE) as worker,
        rollbus.connect(server.url, client=TRAINER) as rb,
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_S)
        anybody = Server(server.url)
        yield Side(rb, anybody, anybody, {"nats": server.pid, "worker": worker.pid, "client": os.getpid()})


@asynccontextmanager
async def with_accounts() -> AsyncIterator[Side]:
    """Run a server with accounts, as `rollbus up --secure` does."""
    async with (
        secure_bus(TRAINER) as bus,
        worker_process(bus.server.url, "--creds", str(bus.worker), *ENGINE) as worker,
        rollbus.connect(bus.server.url, credentials=bus.trainers[0]) as rb,
    ):
        await rb.fleet.wait_for_workers(timeout_s=START_S)
        pids = {"nats": bus.server.pid, "worker": worker.pid, "client": os.getpid()}
        yield Side(rb, bus.worker_server(), Server(bus.server.url, bus.trainers[0]), pids)


async def run_requests(side: Side, load: Load) -> int:
    """Send all requests of a load and wait for their results. Return the number of requests."""
    requests = [bus_request([1, 2, 3, i], load[1], routing=False) for i in range(load[0])]
    async for generation in side.rb.complete_many(requests, max_in_flight=load[0]):
        if generation.error is not None:
            raise RuntimeError(f"no result: {generation.error}")
    return load[0]


async def run_frames(side: Side, count: int) -> int:
    """Publish frames as a worker and receive them as the trainer. Return the number of frames."""
    subject = Subjects(FLEET).frame(TRAINER, WORKER)
    room = asyncio.Semaphore(FRAMES_AT_ONCE)
    all_came = asyncio.Event()
    num_received = 0

    async def receive(_: object) -> None:
        nonlocal num_received
        num_received += 1
        room.release()
        if num_received == count:
            all_came.set()

    async with connected(side.worker, name="worker") as worker, connected(side.trainer, name="trainer") as trainer:
        await subscribe(trainer, subject, receive)
        await trainer.flush()
        for _ in range(count):
            await room.acquire()
            await publish(worker, subject, FRAME)
        await all_came.wait()
    return count


async def measure(run: Callable[[Side], Awaitable[int]], side: Side, processes: Sequence[str]) -> dict[str, float]:
    """Return the requests or frames per second, and the CPU time of each."""
    before = {name: cpu_s(side.pids[name]) for name in processes}
    started = time.perf_counter()
    count = await run(side)
    seconds = time.perf_counter() - started
    spent = {f"{name}_cpu_us": 1e6 * (cpu_s(side.pids[name]) - before[name]) / count for name in processes}
    return {"per_s": count / seconds, **spent, "all_cpu_us": sum(spent.values())}


async def compare(
    report: Report,
    what: str,
    sides: Mapping[str, Side],
    run: Callable[[Side], Awaitable[int]],
    rounds: int,
    processes: Sequence[str] = ("nats", "worker", "client"),
) -> None:
    """Add two rows and their ratio.

    Args:
        processes: processes whose CPU time counts.
    """
    for side in sides.values():
        await run(side)
    found = await take_turns(rounds, sides, lambda name: measure(run, sides[name], processes))
    plain, accounts = found.values()
    found["ratio"] = [{key: b[key] / a[key] for key in a} for a, b in zip(plain, accounts, strict=True)]
    for name, figures in found.items():
        report.add(what=what, way=name, **spreads(figures))


async def run_all(report: Report, loads: Sequence[Load], frames: int, rounds: int) -> None:
    """Start both servers and compare them."""
    async with AsyncExitStack() as stack:
        sides = {
            "no users": await stack.enter_async_context(without_users()),
            "accounts": await stack.enter_async_context(with_accounts()),
        }
        for load in loads:
            await compare(report, f"{load[0]}x{load[1]}", sides, partial(run_requests, load=load), rounds)
        await compare(report, "frames", sides, partial(run_frames, count=frames), rounds, ("nats", "client"))


if __name__ == "__main__":
    program(
        "accounts",
        "Measure the cost of accounts.",
        lambda args, report: uvloop.run(run_all(report, parse_loads(args.loads), args.frames, args.rounds)),
        arg("--loads", "REQUESTSxTOKENS", "", nargs="+", default=["256x64"]),
        arg("--frames", None, "number of frames in a round (default: %(default)s)", type=int, default=2000),
    )
