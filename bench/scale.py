"""Measures the CPU and memory of a request as fleets and queues grow. They should not depend on the size.

    python -m bench.scale [--parts fleet models backlog] [--requests 800] [--queued 100000] [--rounds 2] [--json FILE]

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

A process has many workers or many clients. Each process answers with `Counts`. Clients understand three commands. `run
REQUESTS TOKENS MAX_IN_FLIGHT` starts requests with whole results. `stream` with the same arguments reads token by
token. `wait` answers when the requests of the last command have ended. Any other command is answered immediately.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Final

import msgspec

import rollbus
from bench.processes import Way, answer, own_process
from bench.report import Report, cpu_s, program, resident_bytes
from rollbus.bus.client.dispatch import ORPHAN_AGE_S
from rollbus.bus.nats.connection import Connection, connected
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.queue.streams import QueueLimits, ensure_queue, queue_depths
from rollbus.bus.subjects import Subjects
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.errors import RequestError
from rollbus.schemas.options import arg
from rollbus.workers.engines.synthetic.config import SyntheticConfig

FLEET = "bench"
PROMPT_TOKENS = 64
"""Tokens of a prompt. They are few, as in later turns, because the bench does not measure prompts."""
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the clients of a process so far."""

    done: int = 0
    """Number of requests that have ended."""
    failed: int = 0
    """Number of requests that have ended with an error. stderr has the errors."""
    frames: int = 0
    """Number of received frames, including heartbeats."""


class Load:
    """Runs the load of the clients of one process, and counts.

    Args:
        clients: connected clients.
        tasks: task group in which the load runs.
    """

    def __init__(self, clients: list[rollbus.Client], tasks: asyncio.TaskGroup) -> None:
        self._clients = clients
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []
        self._done = self._failed = 0

    async def answer(self, arguments: list[str]) -> object:
        """Start a load, wait for its end, or only count. Return the counts."""
        match arguments:
            case ["run", requests, tokens, max_in_flight]:
                self._running = [
                    self._tasks.create_task(self._complete(rb, int(requests), int(tokens), int(max_in_flight)))
                    for rb in self._clients
                ]
            case ["stream", requests, tokens, max_in_flight]:
                sources = [(rb, _requests(int(requests), int(tokens))) for rb in self._clients]
                self._running = [
                    self._tasks.create_task(self._stream(rb, source))
                    for rb, source in sources
                    for _ in range(int(max_in_flight))
                ]
            case ["wait"]:
                await asyncio.wait(self._running)
        return asdict(Counts(self._done, self._failed, sum(rb.stats().frames for rb in self._clients)))

    async def _complete(self, rb: rollbus.Client, num_requests: int, num_tokens: int, max_in_flight: int) -> None:
        results = rb.complete_many(_requests(num_requests, num_tokens), max_in_flight=max_in_flight)
        async for generation in results:
            self._done += 1
            if generation.error is not None:
                self._failed += 1
                sys.stderr.write(f"{generation.error}\n")

    async def _stream(self, rb: rollbus.Client, source: Iterator[rollbus.GenerateRequest]) -> None:
        """Run the requests of `source` one after the other, and read each token as it arrives."""
        for request in source:
            try:
                async for _ in rb.generate(request):
                    pass
            except RequestError as error:
                self._failed += 1
                sys.stderr.write(f"{error}\n")
            self._done += 1


def _requests(num_requests: int, num_tokens: int) -> Iterator[rollbus.GenerateRequest]:
    sampling = rollbus.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for i in range(num_requests):
        prompt = [(i + j) % 1000 + 10 for j in range(PROMPT_TOKENS)]
        yield rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)


async def run_clients(url: str, fleet: str, prefix: str, count: str) -> None:
    """Run clients. Each has its own connection and thread, as in separate programs."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(rollbus.connect(url, fleet=fleet, client=f"{prefix}{i}"))
            for i in range(int(count))
        ]
        await clients[-1].fleet.wait_for_workers(1, timeout_s=START_TIMEOUT_S)
        async with asyncio.TaskGroup() as tasks:
            await answer(Load(clients, tasks).answer)


MODEL: Final = "synthetic"
"""Name of the model in `bench.processes`."""
PER_PROCESS: Final = 16
"""Maximum number of workers or clients in one process: 64 workers are in four processes."""


@dataclass(frozen=True, slots=True)
class Used:
    """The resources that the processes of each side have used until one moment, or between two moments."""

    at_s: float
    cpu_s: Mapping[str, float]
    rss_bytes: Mapping[str, int]
    """Resident bytes. Shared libraries count in each process."""

    def since(self, earlier: "Used") -> "Used":
        """Return the time and CPU seconds between `earlier` and this, with the memory of this."""
        spent = {side: seconds - earlier.cpu_s[side] for side, seconds in self.cpu_s.items()}
        return Used(self.at_s - earlier.at_s, spent, self.rss_bytes)


class Fleet:
    """A running fleet.

    Args:
        server: server of all workers and clients.
        nats: connection of this process to it.
        workers: processes of the workers.
        clients: processes of the clients.
    """

    def __init__(
        self, server: EmbeddedServer, nats: Connection, workers: Sequence[Way], clients: Sequence[Way]
    ) -> None:
        self._server = server
        self._nats = nats
        self._clients = clients
        self._pids = {
            "worker": [way.pid for way in workers],
            "client": [way.pid for way in clients],
            "server": [server.pid],
        }

    def used(self) -> Used:
        """Return the resources that each side has used so far."""
        return Used(
            time.monotonic(),
            {side: sum(map(cpu_s, pids)) for side, pids in self._pids.items()},
            {side: sum(map(resident_bytes, pids)) for side, pids in self._pids.items()},
        )

    async def counts(self) -> Counts:
        """Return the counts of all clients so far.

        Raises:
            RuntimeError: a request has failed, or a process has ended.
        """
        counts = await _ask(self._clients, "count")
        if any(one.failed for one in counts):
            raise RuntimeError("requests have failed; the clients printed the errors to stderr")
        return Counts(done=sum(one.done for one in counts), frames=sum(one.frames for one in counts))

    async def begin(self, num_requests: int, num_tokens: int, max_in_flight: int, *, streams: bool = False) -> None:
        """Let each client start `num_requests` requests.

        Args:
            streams: read the tokens as they arrive. False: read whole results.
        """
        await _ask(self._clients, "stream" if streams else "run", num_requests, num_tokens, max_in_flight)

    async def finish(self) -> None:
        """Wait until all requests have ended."""
        await _ask(self._clients, "wait")

    async def pause(self) -> None:
        """Pause the workers, so that requests wait in the queue."""
        async with rollbus.connect(self._server.url, fleet=FLEET) as rb:
            await rb.fleet.pause()

    async def resume(self) -> None:
        """Resume the workers."""
        async with rollbus.connect(self._server.url, fleet=FLEET) as rb:
            await rb.fleet.resume()

    async def num_waiting(self) -> int:
        """Return the number of requests that no worker has pulled."""
        return sum(depth.waiting for depth in await queue_depths(self._nats, Subjects(FLEET), (MODEL,)))


@asynccontextmanager
async def started_fleet(
    num_workers: int, num_clients: int, engine: SyntheticConfig, limits: QueueLimits | None = None
) -> AsyncIterator[Fleet]:
    """Run a fleet while the body runs, and wait until all its workers serve. `limits` are those of its queue."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        url = server.url
        nats = await stack.enter_async_context(connected(url, name="bench"))
        # Workers would create the queue with the usual limits, which stay.
        await ensure_queue(nats, Subjects(FLEET), MODEL, limits)

        async def start(place: str, letter: str, count: int, *args: object) -> list[Way]:
            ways = []
            for first in range(0, count, PER_PROCESS):
                prefix, size = f"{letter}{first}-", min(PER_PROCESS, count - first)
                way = own_process(prefix, place, url, FLEET, prefix, size, *args)
                ways.append(await stack.enter_async_context(way))
            return ways

        workers = await start("processes:workers", "w", num_workers, msgspec.json.encode(engine).decode())
        async with rollbus.connect(url, fleet=FLEET) as rb:
            await rb.fleet.wait_for_workers(num_workers, timeout_s=START_TIMEOUT_S)
        yield Fleet(server, nats, workers, await start("scale:run_clients", "c", num_clients))


async def _ask(ways: Sequence[Way], *question: object) -> list[Counts]:
    """Send a command to one process after the other. Return the answers."""
    return [Counts(**await way.ask(*question)) for way in ways]


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
    return {name.format(side): 1000 * seconds / count for side, seconds in used.cpu_s.items()}


def memory(used: Used) -> dict[str, float]:
    """Return the megabytes of each side in all its processes."""
    return {f"{side}_mb": num_bytes / MEGABYTE for side, num_bytes in used.rss_bytes.items()}


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
    limits = QueueLimits(max_msgs=2 * total, max_per_client=2 * total)
    async with started_fleet(BACKLOG_WORKERS, 1, engine, limits) as fleet:
        await work(fleet, BACKLOG_WORKERS * BACKLOG_SLOTS, BACKLOG_TOKENS, BACKLOG_WORKERS * BACKLOG_SLOTS)
        done = (await fleet.counts()).done

        async def num_done() -> int:
            return (await fleet.counts()).done - done

        async def follow(
            part: str, reached: Callable[[], Awaitable[int]], begin: Callable[[], Awaitable[object]]
        ) -> None:
            """Call `begin`, then report each slice until `reached` has counted all requests."""
            before, last = fleet.used(), 0
            await begin()
            while last < total:
                await asyncio.sleep(POLL_S)
                at = await reached()
                if at >= min(last + total // NUM_SLICES, total):
                    now = fleet.used()
                    report.add(part=part, at=at, **cost(now.since(before), at - last), **memory(now))
                    before, last = now, at

        await fleet.pause()
        await follow("queueing", fleet.num_waiting, lambda: fleet.begin(total, BACKLOG_TOKENS, total))
        # After this time, clients ask the queue whether their requests still wait.
        await asyncio.sleep(ORPHAN_AGE_S)
        resting = await idle(fleet)
        report.add(part="waiting", at=total, **cost(resting, resting.at_s, "{}_idle"), **memory(resting))
        await follow("draining", num_done, fleet.resume)
        await fleet.finish()
        done += total
        await follow("passing", num_done, lambda: fleet.begin(total, BACKLOG_TOKENS, total // PASSING))
        await fleet.finish()


PARTS = {"fleet": measure_fleets, "models": measure_models, "backlog": measure_backlog}
"""The functions that measure the parts, by name."""


def _run(args: argparse.Namespace, report: Report) -> None:
    for part in args.parts:
        asyncio.run(PARTS[part](report, args))


if __name__ == "__main__":
    program(
        "scale",
        "Measure requests as fleets grow.",
        _run,
        arg("--parts", PARTS, "", nargs="+", default=list(PARTS)),
        arg("--requests", None, "requests of the part fleet (default: %(default)s)", type=int, default=800),
        arg("--queued", None, "requests of the part backlog (default: %(default)s)", type=int, default=100000),
        rounds=2,
    )
