"""Worker processes for tests, run with `python -m rollbus.workers` and killed at the end of the test."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tests.support.patience import UNHURRIED_LEASE_S

LASTING = ("--lease-s", f"{UNHURRIED_LEASE_S:g}")
"""A lease that a worker keeps on a busy machine, for tests without faults."""


@contextlib.asynccontextmanager
async def worker_process(
    nats_url: str,
    fleet: str,
    *options: str,
    engine_args: Mapping[str, object] | None = None,
    stderr: int | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[Process]:
    """Start a worker process; without `--model` it has the synthetic engine. It inherits stderr by default."""
    engine = () if "--model" in options else ("--engine", "synthetic")
    arguments = json.dumps(engine_args or {})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollbus.workers", "--nats", nats_url, "--fleet", fleet, "--engine-args", arguments),
        *engine,
        # By default the worker does not listen for another worker with its id, because that wait lasts a whole lease.
        *("--listen-s", "0"),
        *options,
        stderr=stderr,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
