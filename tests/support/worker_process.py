"""Worker processes for tests: `python -m rollbus.workers`, killed at the latest when the test ends."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping

from tests.support.patience import UNHURRIED_LEASE_S

__all__ = ["LASTING", "worker_process"]

LASTING = ("--lease-s", f"{UNHURRIED_LEASE_S:g}")
"""For a worker that nothing happens to: it keeps its lease on a busy machine, too."""


@contextlib.asynccontextmanager
async def worker_process(
    nats_url: str,
    fleet: str,
    *options: str,
    engine_args: Mapping[str, object] | None = None,
    stderr: int | None = None,
) -> AsyncIterator[Process]:
    """Start a worker; without `--model` on the synthetic engine. Its stderr is the test's own unless given."""
    engine = () if "--model" in options else ("--engine", "synthetic")
    arguments = json.dumps(engine_args or {})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollbus.workers", "--nats", nats_url, "--fleet", fleet, "--engine-args", arguments),
        *engine,
        # Unless told otherwise, it does not listen for another worker of its id, which takes a lease.
        *("--listen-s", "0"),
        *options,
        stderr=stderr,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
