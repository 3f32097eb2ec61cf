"""Show the live workers of the fleet: what they serve, how busy they are, how they are; and what waits for them.

Exits with 5 when no worker answers.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from frontend.cli.arguments import without_password
from frontend.cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from bus import QueueDepth
    from schemas.presence import RoutedExpertsInfo, WorkerPresence

__all__ = ["HELP", "add_arguments", "describe_routing", "queue_rows", "run", "worker_row"]

HELP = "show the workers of the fleet and their queues"

COLUMNS = (
    *("worker", "model", "state", "weights", "in flight", "free slots"),
    *("routing", "max_model_len", "uptime", "last error"),
)
LANES = ("resume", "high", "normal", "low")
QUEUE_COLUMNS = ("queue", *LANES, "in hand")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(args: argparse.Namespace) -> int:
    """Print the fleet's state."""
    from frontend.cli.app import run_async

    return run_async(_status(args))


async def _status(args: argparse.Namespace) -> int:
    import bus
    from frontend.cli.console import print_json, print_table, say

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        state = await rb.fleet.state()
    if args.json:
        print_json(state)
    elif state.workers:
        print_table(COLUMNS, [worker_row(worker) for worker in state.workers])
        if state.queues:
            say()
            print_table(QUEUE_COLUMNS, queue_rows(state.queues))
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


def queue_rows(depths: "Sequence[QueueDepth]") -> list[list[str]]:
    """One row for each model, as many cells as `QUEUE_COLUMNS`: what waits in each lane, and what workers were handed.

    A request is in a worker's hand until its client has heard of it.
    """
    waiting: dict[tuple[str, str], int] = {(depth.model, depth.lane): depth.waiting for depth in depths}
    in_hand = {model: sum(depth.in_hand for depth in depths if depth.model == model) for model, _ in waiting}
    return [
        [model, *(str(waiting[model, lane]) if (model, lane) in waiting else "-" for lane in LANES), str(count)]
        for model, count in in_hand.items()
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
