"""Worker processes for tests: `python -m workers`, killed at the latest when the test ends."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping

__all__ = ["worker_process"]


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
        *(sys.executable, "-m", "workers", "--nats", nats_url, "--fleet", fleet, "--engine-args", arguments),
        *engine,
        *options,
        stderr=stderr,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
