"""Shows the state of a fleet for `rollbus status`, once or every second."""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from msgspec.structs import replace

from ...bus import BusBroken, Client, FleetState
from . import fleet_tables as tables
from .console import note, plain_table, print_json, print_table, rich_table, write
from .fleet_tables import state_as_json

__all__ = ["print_state", "watch_state"]

INTERVAL_S: Final = 1.0
"""Seconds between two updates. Workers publish presence at the same interval."""


CHECK_S: Final = 10.0
"""Seconds between two probes of the queues."""


def print_state(state: FleetState) -> None:
    """Print the tables of a fleet on stdout."""
    for number, (columns, rows) in enumerate(_tables(state)):
        if number:
            write()
        print_table(columns, rows)


async def watch_state(rb: Client, *, nothing: str, as_json: bool) -> None:
    """Show the fleet every second until this task is cancelled or the reader closes the pipe.

    On a terminal the tables change in place. Elsewhere they are printed again. If the server does not answer, print the
    error and continue.

    Args:
        nothing: text that is shown if no worker is live.
        as_json: print each state as one line of JSON.
    """
    with _shown_in_place(nothing) if sys.stdout.isatty() and not as_json else _printed(nothing, as_json) as show:
        is_read, checked_at = True, -math.inf
        while is_read:
            began = time.monotonic()
            try:
                if began - checked_at >= CHECK_S:
                    checked_at, problems = began, await rb.fleet.check_queues()
                state = await rb.fleet.state()
                is_read = show(replace(state, queue_problems=problems | state.queue_problems))
            except BusBroken as exc:
                note(f"rollbus: {exc}")
            await asyncio.sleep(began + INTERVAL_S - time.monotonic())


@contextmanager
def _shown_in_place(nothing: str) -> Iterator[Callable[[FleetState], bool]]:
    from rich.console import Console, Group
    from rich.live import Live

    def show(state: FleetState) -> bool:
        shown = [rich_table(columns, rows) for columns, rows in _tables(state)]
        live.update(Group(f"{_heading(state)}; Ctrl-C ends", *(shown if state.workers else [nothing])), refresh=True)
        return True

    with Live(console=Console(markup=False, highlight=False), auto_refresh=False) as live:
        yield show


@contextmanager
def _printed(nothing: str, as_json: bool) -> Iterator[Callable[[FleetState], bool]]:
    def show(state: FleetState) -> bool:
        if as_json:
            return print_json(state_as_json(state))
        shown = [plain_table(columns, rows) for columns, rows in _tables(state)]
        return write("\n\n".join((_heading(state), *(shown if state.workers else [nothing]))) + "\n")

    yield show


def _heading(state: FleetState) -> str:
    return f"fleet {state.fleet} at {time.strftime('%H:%M:%S')}"


def _tables(state: FleetState) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Return columns and rows of each table that is not empty."""
    every = (
        (tables.WORKER_COLUMNS, [tables.worker_row(worker) for worker in state.workers]),
        (tables.TRANSFER_COLUMNS, tables.transfer_rows(state.workers)),
        (tables.STOP_COLUMNS, tables.stop_rows(state.desired)),
        (tables.STAGING_COLUMNS, tables.staging_rows(state.workers)),
        (tables.PUBLISHED_COLUMNS, tables.published_rows(state.workers)),
        (tables.PREFIX_COLUMNS, tables.prefix_rows(state.workers)),
        (tables.QUEUE_COLUMNS, tables.queue_rows(state.queues)),
        (tables.PROBLEM_COLUMNS, tables.problem_rows(state.queue_problems)),
        (tables.DESIRED_COLUMNS, tables.desired_rows(state.desired)),
        (tables.ENGINE_COLUMNS, tables.engine_rows(state.workers)),
        (tables.ERROR_COLUMNS, tables.error_rows(state.workers)),
    )
    return [(columns, rows) for columns, rows in every if rows]
