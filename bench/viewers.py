"""Measures what viewers of a fleet cost: tokens per second without viewers and with many viewers.

    python -m bench.viewers [--viewers 50] [--seconds 5] [--rounds 5] [--json FILE]

The service has its own process, and so have the viewers, which read all events. A third process has a worker with a
synthetic engine, and the client that keeps it busy over the bus. The bench prints, with and without viewers, the tokens
per second of the fleet and the processor time that the service needs per second.
"""

import asyncio
import time
from urllib.parse import urlsplit

import rollbus
from bench.http_memory import running_service, running_worker
from bench.processes import answer, own_process
from bench.report import Report, cpu_s, program, take_turns
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import spreads
from rollbus.schemas.options import arg
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

IN_FLIGHT = 32
MAX_TOKENS = 64


async def watch(address: str, count: str) -> None:
    """Read the events as `count` viewers until stdin ends. Print `ready` when all viewers have their first event."""
    url = urlsplit(address)
    head = f"GET /v1/rl/events HTTP/1.1\r\nHost: {url.hostname}\r\n\r\n".encode()
    readers = []
    for _ in range(int(count)):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head)
        readers.append((reader, writer))
    for reader, _ in readers:
        await reader.readuntil(b"event: fleet")

    async def read(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(read(reader)) for reader, _ in readers]
        await answer()
        for task in watching:
            task.cancel()


async def tokens_in(rb: rollbus.Client, seconds: float) -> int:
    """Keep the worker busy for `seconds`. Return the number of received tokens."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    end = time.monotonic() + seconds
    found = 0

    async def ask() -> None:
        nonlocal found
        while time.monotonic() < end:
            found += len((await rb.complete(GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling))).token_ids)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(ask())
    return found


async def measure(rb: rollbus.Client, service: tuple[int, str], count: int, seconds: float) -> dict[str, float]:
    """Return the figures of one round."""
    process, address = service
    async with own_process("viewers", "viewers:watch", address, count):
        begun, before = time.monotonic(), cpu_s(process)
        tokens = await tokens_in(rb, seconds)
        took = time.monotonic() - begun
        return {"tokens_per_s": tokens / took, "service_cpu_percent": 100 * (cpu_s(process) - before) / took}


async def run(viewers: int, seconds: float, rounds: int, report: Report) -> None:
    """Start everything, measure and print."""
    async with (
        EmbeddedServer() as server,
        running_worker(server.url),
        running_service(server.url) as service,
        rollbus.connect(server.url) as rb,
    ):
        await rb.fleet.wait_for_workers()
        await tokens_in(rb, min(seconds, 1.0))
        found = await take_turns(rounds, [0, viewers], lambda count: measure(rb, service, count, seconds))
    for count, figures in found.items():
        report.add(viewers=count, **spreads(figures))


if __name__ == "__main__":
    program(
        "viewers",
        "Measure the cost of viewers of a fleet.",
        lambda args, report: asyncio.run(run(args.viewers, args.seconds, args.rounds, report)),
        arg("--viewers", None, "", type=int, default=50),
        arg("--seconds", None, "seconds of each round (default: %(default)s)", type=float, default=5.0),
    )
