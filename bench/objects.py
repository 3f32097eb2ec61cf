"""Measures MiB per second into NATS's object store and from the store into a file, with checksums.

    python -m bench.objects [--megabytes 256] [--rounds 5] [--peer-megabytes 16] [--json FILE]

The ways of nats-py are measured too. All ways use one server, which the bench starts. The server stores on the disk
that the bench reads and writes. Each round leaves its objects and files there until the end. nats-py puts object parts
of 128 KB. Its get takes a second for 16 MB, so it gets fewer megabytes.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import uvloop

from bench.report import Report, program
from rollbus.bus.nats.connection import Connection, connected
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.objects.catalog import ensure_bucket
from rollbus.bus.objects.reader import ObjectReader
from rollbus.bus.objects.writer import put_folder
from rollbus.frontend.cli.tables import Spread, in_turns
from rollbus.schemas.options import arg

MEGABYTE = 1024 * 1024
BUCKET = "bench"


Run = Callable[[int], Awaitable[object]]
"""Moves all megabytes. The argument is the number of the round."""


async def measure_in_turns(report: Report, rounds: int, ways: Mapping[str, tuple[int, Run]]) -> None:
    """Measure `ways` and add a row for each.

    Args:
        ways: megabytes of each way, and the function that moves them.
    """
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for name, (megabytes, move) in in_turns(rounds, ways.items()):
        started = time.perf_counter()
        await move(len(rates[name]))
        rates[name].append(megabytes / (time.perf_counter() - started))
    for name, (megabytes, _) in ways.items():
        report.add(way=name, mib=megabytes, mib_per_s=Spread.of(rates[name]))


def write_source(folder: Path, megabytes: int) -> Path:
    """Write a folder with one file of random bytes."""
    folder.mkdir()
    with (folder / "file").open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(MEGABYTE))
    return folder


async def fetch(reader: ObjectReader, objects: str, into: Path) -> None:
    """Fetch all objects of a folder, as workers do."""
    async with reader.open_folder(objects) as folder:
        for name in folder.names:
            await folder.fetch(name, into / name, lambda _: None)


async def measure(url: str, nats: Connection, scratch: Path, args: argparse.Namespace, report: Report) -> None:
    """Run all measurements."""
    source = write_source(scratch / "source", args.megabytes)
    peer_source = write_source(scratch / "peer-source", args.peer_megabytes)
    reader = ObjectReader(url, name="bench")
    await ensure_bucket(nats, BUCKET)
    store = await nats.jetstream().object_store(BUCKET)

    async def put(i: int) -> None:
        await put_folder(nats, BUCKET, f"step-{i}", source)

    async def get(i: int) -> None:
        await fetch(reader, f"{BUCKET}/step-{i}", scratch / f"cache-{i}")

    async def put_by_peer(i: int) -> None:
        with (source / "file").open("rb") as file:
            await store.put(f"peer-{i}/file", file)

    async def get_from_peer(i: int) -> None:
        await fetch(reader, f"{BUCKET}/peer-{i}", scratch / f"peer-cache-{i}")

    async def get_by_peer(i: int) -> None:
        with (scratch / f"peer-file-{i}").open("wb") as file:
            await store.get("small/file", writeinto=file)

    await put_folder(nats, BUCKET, "small", peer_source)
    ways = {
        "put_folder": (args.megabytes, put),
        "fetch": (args.megabytes, get),
        "nats-py put": (args.megabytes, put_by_peer),
        "fetch of what it put": (args.megabytes, get_from_peer),
        "nats-py get": (args.peer_megabytes, get_by_peer),
    }
    await measure_in_turns(report, args.rounds, ways)


async def run(args: argparse.Namespace, report: Report) -> None:
    """Start a server, measure and print."""
    with tempfile.TemporaryDirectory(prefix="rollbus-bench-") as scratch:
        async with EmbeddedServer() as server, connected(server.url, name="bench") as nats:
            await measure(server.url, nats, Path(scratch), args, report)


if __name__ == "__main__":
    program(
        "objects",
        "Measure MiB/s through NATS's object store.",
        lambda args, report: uvloop.run(run(args, report)),
        arg("--megabytes", None, "", type=int, default=256),
        arg("--peer-megabytes", None, "MiB that nats-py gets (default: %(default)s)", type=int, default=16),
    )
