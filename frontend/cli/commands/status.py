"""Show the live workers of the fleet: what they do, what they should do, what they can do; and what waits for them.

Exits with 5 when no worker answers.
"""

import argparse
from typing import TYPE_CHECKING

from ..arguments import without_password
from ..exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from ....bus import FleetState

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "show the workers of the fleet and their queues"
EXAMPLES = (
    "rollbus status",
    "rollbus status --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


async def run(args: argparse.Namespace) -> int:
    """Print the fleet's state."""
    from .... import bus
    from ..console import print_json
    from ..fleet_tables import state_as_json

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        state = await rb.fleet.state()
    if args.json:
        print_json(state_as_json(state))
    elif state.workers:
        _show(state)
    if not state.workers:
        raise CommandFailed(
            f"no live workers in fleet {args.fleet!r} at {without_password(args.nats)}; "
            "start some with `rollbus up` or `rollbus worker`",
            ExitCode.NO_WORKERS,
        )
    return ExitCode.OK


def _show(state: "FleetState") -> None:
    from .. import fleet_tables as tables
    from ..console import print_table, write

    print_table(tables.WORKER_COLUMNS, [tables.worker_row(worker) for worker in state.workers])
    for columns, rows in (
        (tables.QUEUE_COLUMNS, tables.queue_rows(state.queues)),
        (tables.PROBLEM_COLUMNS, tables.problem_rows(state.queue_problems)),
        (tables.DESIRED_COLUMNS, tables.desired_rows(state.desired)),
        (tables.ENGINE_COLUMNS, tables.engine_rows(state.workers)),
        (tables.ERROR_COLUMNS, tables.error_rows(state.workers)),
    ):
        if rows:
            write()
            print_table(columns, rows)
