"""Finds the workers that serve, for commands that need at least one serving worker."""

from collections.abc import Sequence

from ...bus import Client, FleetState
from ...bus.protocol.fleet.fleet_snapshot import FleetSnapshot, accepts_whole_requests
from ...schemas.presence import WorkerPresence, WorkerState
from .arguments import without_password
from .console import note, program
from .exits import CommandFailed, ExitCode

__all__ = ["serving_workers", "warn_of_wait"]


def serving_workers(workers: Sequence[WorkerPresence], *, nats_url: str, fleet: str) -> list[WorkerPresence]:
    """Return the workers in `workers` that accept requests now.

    Raises:
        CommandFailed: no worker accepts requests. The message has the state of each worker.
    """
    serving = [worker for worker in workers if worker.state is WorkerState.SERVING and accepts_whole_requests(worker)]
    if not serving:
        raise CommandFailed(
            f"no worker serves in fleet {fleet!r} at {without_password(nats_url)}"
            f"{_others(workers) or ' (no worker is live)'}; start one with `rollbus up` or `rollbus worker`",
            ExitCode.NO_WORKERS,
        )
    return serving


async def warn_of_wait(rb: Client, state: FleetState, *, nats_url: str) -> None:
    """Print on stderr why requests must wait. Print nothing if a worker serves.

    Raises:
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
