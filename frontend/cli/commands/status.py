"""Show the live workers of the fleet: what they serve, how busy they are, how they are.

Exits with 5 when no worker answers.
"""

import argparse
from typing import TYPE_CHECKING

from frontend.cli.arguments import without_password
from frontend.cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from schemas.presence import RoutedExpertsInfo, WorkerPresence

__all__ = ["HELP", "add_arguments", "describe_routing", "run", "worker_row"]

HELP = "show the workers of the fleet"

COLUMNS = (
    *("worker", "model", "state", "weights", "in flight", "free slots"),
    *("routing", "max_model_len", "uptime", "last error"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(args: argparse.Namespace) -> int:
    """Print the fleet's state."""
    from frontend.cli.app import run_async

    return run_async(_status(args))


async def _status(args: argparse.Namespace) -> int:
    import bus
    from frontend.cli.console import print_json, print_table

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        state = await rb.fleet.state()
    if args.json:
        print_json(state)
    elif state.workers:
        print_table(COLUMNS, [worker_row(worker) for worker in state.workers])
    if not state.workers:
        raise CommandFailed(
            f"no live workers in fleet {args.fleet!r} at {without_password(args.nats)}; "
            "start some with `rollbus up` or `rollbus worker`",
            ExitCode.NO_WORKERS,
        )
    return ExitCode.OK


def worker_row(worker: "WorkerPresence") -> list[str]:
    """The cells of one worker, as many as `COLUMNS`."""
    known = worker.capabilities
    return [
        worker.worker,
        worker.model,
        worker.state,
        str(worker.weight_version),
        str(worker.in_flight),
        str(worker.free_slots),
        "-" if known is None else describe_routing(known.routed_experts),
        "-" if known is None else str(known.max_model_len),
        _duration(worker.uptime_s),
        worker.last_error or "-",
    ]


def describe_routing(info: "RoutedExpertsInfo | None") -> str:
    """What a row of routed experts holds, in a few words."""
    if info is None:
        return "none"
    return f"{info.num_layers} layers, top {info.top_k} of {info.num_experts}, {info.dtype}"


def _duration(seconds: float) -> str:
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"
