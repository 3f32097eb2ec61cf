"""Docker's health check of a worker: exits with 0 while the fleet sees it alive, with the weights that it should have.

A paused worker is healthy; one that loads, or has lost its lease, is not.
"""

import asyncio
import sys
from pathlib import Path

import rollbus
from rollbus.bus.auth.credentials import load_credentials
from rollbus.schemas.presence import WorkerState

WORKER = Path("/tmp/worker.creds")
VIEWER = "/keys/viewer/viewer.creds"
UNHEALTHY = {
    WorkerState.STARTING,
    WorkerState.FENCED,
    WorkerState.OUTDATED,
    WorkerState.POISONED,
    WorkerState.WAITING_FOR_WEIGHTS,
}


async def main() -> int:
    """Ask the fleet, as somebody who only looks."""
    name = load_credentials(WORKER).name
    async with rollbus.connect(credentials=VIEWER) as rb:
        fleet = await rb.fleet.state()
    states = [worker.state for worker in fleet.workers if worker.worker == name]
    sys.stdout.write(f"{name}: {', '.join(states) or 'not heard'}\n")
    return int(not states or not UNHEALTHY.isdisjoint(states))


sys.exit(asyncio.run(main()))
