"""Finds the workers that serve, for commands that need at least one serving worker."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from nats.aio.msg import Msg

from ...bus import Client, FleetState, InvalidRequest, NoWorkers
from ...bus.nats.connection import connected, subscribe
from ...bus.nats.server import Server
from ...bus.protocol.fleet.fleet_snapshot import FleetSnapshot, accepts_whole_requests
from ...bus.subjects import ALL_PRESENCES, Subjects
from ...schemas.presence import WorkerPresence, WorkerState
from .arguments import without_password
from .console import note, program
from .exits import CommandFailed, ExitCode

__all__ = ["fleets_with_workers", "serving_workers", "warn_of_wait"]

HEAR_S: Final = 2.0
"""Seconds to listen for presence, which workers publish each second."""
MAX_FLEETS: Final = 16
"""Fleets that an error message names."""


async def fleets_with_workers(nats_url: str, fleet: str) -> set[str]:
    """Return the fleets with live workers at the server, at most `MAX_FLEETS`. Stop when `fleet` is found.

    A user with credentials may read only its own fleet.

    Raises:
        BusBroken: the server cannot be reached.
    """
    server = Server.named(nats_url)
    found: set[str] = set()
    is_own = asyncio.Event()

    async def receive(message: Msg) -> None:
        name = message.subject.split(".")[2]
        with contextlib.suppress(InvalidRequest):
            Subjects(name)
            if len(found) < MAX_FLEETS:
                found.add(name)
        if name == fleet:
            is_own.set()

    async with connected(server, name="rollbus") as nats:
        await subscribe(nats, ALL_PRESENCES if server.credentials is None else Subjects(fleet).presences, receive)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAR_S):
                await is_own.wait()
    return found | {fleet} if is_own.is_set() else found


def serving_workers(workers: Sequence[WorkerPresence], *, nats_url: str, fleet: str) -> list[WorkerPresence]:
    """Return the workers in `workers` that accept requests now.

    Raises:
        NoWorkers: no worker is live.
        CommandFailed: no worker accepts requests. The message has the state of each worker.
    """
    if not workers:
        raise NoWorkers(message="no worker is live")
    serving = [worker for worker in workers if worker.state is WorkerState.SERVING and accepts_whole_requests(worker)]
    if not serving:
        raise CommandFailed(
            f"no worker serves in fleet {fleet!r} at {without_password(nats_url)}"
            f"{_others(workers)}; start one with `rollbus up` or `rollbus worker`",
            ExitCode.NO_WORKERS,
        )
    return serving


async def warn_of_wait(rb: Client, state: FleetState, *, nats_url: str) -> None:
    """Print on stderr why requests must wait. Print nothing if a worker serves.

    Raises:
        NoWorkers: no worker is live.
        CommandFailed: no worker serves, and requests cannot wait because no worker is paused, updates or starts.
    """
    present = [worker for worker in state.workers if worker.state.is_present and accepts_whole_requests(worker)]
    if not FleetSnapshot(tuple(state.workers)).awaited:
        serving_workers(state.workers, nats_url=nats_url, fleet=state.fleet)
    if any(worker.state is WorkerState.SERVING for worker in present):
        return
    paused = [worker for worker in present if worker.state is WorkerState.PAUSED]
    if not paused:
        note(f"no worker serves now{_others(state.workers)}: the requests wait")
        return
    await rb.fleet.mute_pause()
    times = [await rb.fleet.paused_since(model) for model in {worker.model for worker in paused}]
    since = max((time for time in times if time is not None), default=None)
    when = "" if since is None else f" since {since.astimezone():%Y-%m-%d %H:%M:%S}"
    note(f"the fleet is paused{when}; the requests wait for: {program()} resume{_options(nats_url, state.fleet)}")


def _others(workers: Sequence[WorkerPresence]) -> str:
    return FleetSnapshot(tuple(workers)).describe_others(None)


def _options(nats_url: str, fleet: str) -> str:
    """Return the options with which another command reaches the same fleet."""
    from .app import DEFAULT_FLEET, DEFAULT_NATS

    nats = "" if nats_url == DEFAULT_NATS else f" --nats {without_password(nats_url)}"
    return nats + ("" if fleet == DEFAULT_FLEET else f" --fleet {fleet}")
