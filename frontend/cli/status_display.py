"""Shows the state of a fleet for `rollbus status`, once or every second."""

import asyncio
import math
import shutil
import time
from collections.abc import AsyncIterator
from typing import Final

from msgspec.structs import replace

from ...bus import BusBroken, Client, FleetState
from . import fleet_tables as tables
from .console import note, print_json, write
from .fleet_tables import state_as_json
from .tables import lay_out

__all__ = ["fleet_states", "print_state", "state_lines", "watch_state"]

INTERVAL_S: Final = 1.0
"""Seconds between two updates. Workers publish presence at the same interval."""
CHECK_S: Final = 10.0
"""Seconds between two probes of the queues."""


def print_state(state: FleetState) -> None:
    """Print the tables of a fleet on stdout."""
    write("\n".join(state_lines(state, shutil.get_terminal_size().columns)))


def state_lines(state: FleetState, width: int) -> list[str]:
    """Return the tables of a fleet that are not empty, with an empty line between them."""
    every = (
        (tables.WORKER_COLUMNS, tables.worker_rows(state.workers)),
        (tables.PROBLEM_COLUMNS, tables.problem_rows(state.queue_problems)),
        (tables.STOP_COLUMNS, tables.stop_rows(state.desired)),
        (tables.TRANSFER_COLUMNS, tables.transfer_rows(state.workers)),
        (tables.QUEUE_COLUMNS, tables.queue_rows(state.queues)),
        (tables.DESIRED_COLUMNS, tables.desired_rows(state.desired)),
        (tables.PUBLISHED_COLUMNS, tables.published_rows(state.workers)),
        (tables.PREFIX_COLUMNS, tables.prefix_rows(state.workers)),
        (tables.ENGINE_COLUMNS, tables.engine_rows(state.workers)),
    )
    return [line for columns, rows in every if rows for line in ("", *lay_out(columns, rows, width).lines)][1:]


async def watch_state(rb: Client, *, nothing: str, as_json: bool) -> None:
    """Show the fleet every second until the user or the reader of the pipe ends it.

    On a terminal the tables change in place, and keys scroll them. Elsewhere they are printed again. If the server does
    not answer, show the error and continue.

    Args:
        nothing: text that is shown if no worker is live.
        as_json: print each state as one line of JSON.
    """
    from .top.full_screen import is_capable
    from .top.pages import show_pages

    def lines_of(state: FleetState, width: int) -> list[str]:
        heading = f"fleet {state.fleet} at {time.strftime('%H:%M:%S')}"
        return [heading, "", *(state_lines(state, width) if state.workers else [nothing])]

    if is_capable() and not as_json:
        await show_pages(fleet_states(rb), lines_of)
        return
    async for state in fleet_states(rb):
        if isinstance(state, BusBroken):
            note(f"rollbus: {state}")
        elif as_json:
            if not print_json(state_as_json(state)):
                return
        elif not write("\n".join(lines_of(state, shutil.get_terminal_size().columns)) + "\n"):
            return


async def fleet_states(rb: Client) -> AsyncIterator[FleetState | BusBroken]:
    """Yield the state of the fleet each second, or the error if the server does not answer."""
    problems, checked_at = dict[str, str](), -math.inf
    while True:
        began = time.monotonic()
        try:
            if began - checked_at >= CHECK_S:
                checked_at, problems = began, dict(await rb.fleet.check_queues())
            state = await rb.fleet.state()
            yield replace(state, queue_problems=problems | dict(state.queue_problems))
        except BusBroken as exc:
            yield exc
        await asyncio.sleep(began + INTERVAL_S - time.monotonic())
