"""Shows text that changes and is longer than the screen, with keys that scroll it."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence

from rich.text import Text

from ....bus import BusBroken, FleetState
from ..console import write
from .full_screen import FullScreen, held_logs
from .options import TopOptions, press
from .screen import folded
from .top import Events

__all__ = ["draw_page", "show_pages"]


async def show_pages(
    states: AsyncIterator[FleetState | BusBroken], lines_of: Callable[[FleetState, int], Sequence[str]]
) -> None:
    """Show each state in the terminal until a key or a signal ends it. The last state stays on the terminal.

    Args:
        states: states, and errors that are shown above the last state.
        lines_of: returns the lines of a state for a terminal of this width.
    """
    shown: FleetState | None = None
    problem = ""

    async def read() -> None:
        nonlocal shown, problem
        async for state in states:
            if isinstance(state, BusBroken):
                problem = str(state)
            else:
                shown, problem = state, ""
            events.wake()

    with held_logs(), FullScreen() as screen, Events(screen).listening() as events:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="status.read")
            options: TopOptions | None = TopOptions()
            while options is not None:
                width, height = screen.size
                lines = [problem] if problem else []
                lines += lines_of(shown, width) if shown is not None else ["waiting for the state of the fleet"]
                text, options, num_shown = draw_page(lines, options, width, height)
                screen.show(text)
                await events.wait_until(math.inf)
                for key in events.pop_keys():
                    options = None if options is None else press(options, key, [], num_shown)
            reading.cancel()
    if shown is not None:
        write("\n".join(lines_of(shown, width)))


def draw_page(lines: Sequence[str], options: TopOptions, width: int, height: int) -> tuple[Text, TopOptions, int]:
    """Return the part of the lines that is scrolled to, the options with a limited `first`, and its number of lines."""
    pieces = [piece for line in lines for piece in folded(Text(line), width)]
    room = max(height - 1, 1)
    first = max(min(options.first, len(pieces) - room), 0)
    where = f"lines {first + 1} to {min(first + room, len(pieces))} of {len(pieces)}"
    keys = Text(f"q quit  up, down, page: {where}"[:width], "dim")
    page = pieces[first : first + room]
    blank = [Text()] * (room - len(page))
    return Text("\n").join([*page, *blank, keys][:height]), TopOptions(first=first), room
