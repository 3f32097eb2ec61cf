"""Megabytes a second into NATS's object store and out of it into a file, checksums included, beside nats-py's own get.

    python -m bench.objects [--megabytes 256] [--rounds 5] [--peer-megabytes 16]

Prints the best of the rounds and the worst, on one server, which is started for it; it stores on the same disk that is
read and written here. nats-py puts parts of 128 KB; its get takes a second for 16 MB, so that it gets less to do.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bus.connection import Connection, close_connection, open_connection
from bus.embedded import EmbeddedServer
from bus.objects import ObjectReader, put_folder
from bus.objects.catalog import ensure_bucket

MEGABYTE = 1024 * 1024
BUCKET = "bench"


async def best_of(rounds: int, name: str, megabytes: int, run: Callable[[int], Awaitable[object]]) -> None:
    """Measure `run`, which moves `megabytes` and takes the number of the round, and print one line."""
    rates = []
    for i in range(rounds):
        started = time.perf_counter()
        await run(i)
        rates.append(megabytes / (time.perf_counter() - started))
    sys.stdout.write(
        f"{name:<28} {megabytes:>5} MB: {max(rates):>6,.0f} MB/s (best of {rounds}; from {min(rates):,.0f})\n"
    )
    sys.stdout.flush()


def write_source(folder: Path, megabytes: int) -> Path:
    """Write a folder with one file of random bytes."""
    folder.mkdir()
    with (folder / "file").open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(MEGABYTE))
    return folder


async def measure(url: str, nats: Connection, scratch: Path, args: argparse.Namespace) -> None:
    """Run all measurements."""
    source = write_source(scratch / "source", args.megabytes)
    peer_source = write_source(scratch / "peer-source", args.peer_megabytes)
    reader = ObjectReader(url, name="bench")
    await ensure_bucket(nats, BUCKET)
    store = await nats.jetstream().object_store(BUCKET)

    async def put(i: int) -> None:
        await put_folder(nats, BUCKET, f"step-{i}", source)

    async def get(i: int) -> None:
        await reader.fetch_folder(f"{BUCKET}/step-{i}", scratch / f"cache-{i}", lambda stage: None)

    async def put_by_peer(i: int) -> None:
        with (source / "file").open("rb") as file:
            await store.put(f"peer-{i}/file", file)

    async def get_from_peer(i: int) -> None:
        await reader.fetch_folder(f"{BUCKET}/peer-{i}", scratch / f"peer-cache-{i}", lambda stage: None)

    async def get_by_peer(i: int) -> None:
        with (scratch / f"peer-file-{i}").open("wb") as file:
            await store.get("small/file", writeinto=file)

    await best_of(args.rounds, "put_folder", args.megabytes, put)
    await best_of(args.rounds, "fetch_folder", args.megabytes, get)
    await best_of(args.rounds, "nats-py put", args.megabytes, put_by_peer)
    await best_of(args.rounds, "fetch_folder of what it put", args.megabytes, get_from_peer)
    await put_folder(nats, BUCKET, "small", peer_source)
    await best_of(2, "nats-py get", args.peer_megabytes, get_by_peer)


async def run(args: argparse.Namespace) -> None:
    """Start a server, measure, print."""
    async with EmbeddedServer() as server:
        nats = await open_connection(server.url, name="bench")
        try:
            with tempfile.TemporaryDirectory(prefix="rollbus-bench-") as scratch:
                await measure(server.url, nats, Path(scratch), args)
        finally:
            await close_connection(nats)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.objects", description="MB/s through NATS's object store.")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-megabytes", type=int, default=16)
    args = parser.parse_args()
    sys.stdout.write(f"{' '.join(['python -m bench.objects', *sys.argv[1:]])}\n")
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
