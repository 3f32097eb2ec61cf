"""Shows a list of requests in the terminal, and the trace of the request that the user opens."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final, get_args

from msgspec.structs import replace
from rich.text import Text

from ...bus import Client, RequestList, RequestTrace, WorkerTimeline
from ...schemas.errors import RollbusError
from ...schemas.telemetry import RequestKind
from ..request_traces import RequestQuery
from .request_tables import id_of, list_notes, list_table
from .tables import printable, wrapped
from .top.full_screen import FullScreen, held_logs
from .top.options import Key, TopOptions, press
from .top.pages import draw_page
from .top.top import Events
from .trace_tables import trace_lines

__all__ = ["Browser", "browse"]

READ_EVERY_S: Final = 1.0
"""Seconds between two reads of the list or trace."""
_LISTS: Final[tuple[RequestKind, ...]] = get_args(RequestKind)
_KEYS: Final = "q quit  up, down  Enter trace  s next list"
_STEPS: Final = {"up": -1, "down": 1, "page_up": -10, "page_down": 10, "home": -10_000, "end": 10_000}


@dataclass(slots=True)
class Browser:
    """What the terminal shows. Reads no terminal and asks no worker."""

    query: RequestQuery
    found: RequestList | None = None
    selected: tuple[object, ...] | None = None
    """Key of the selected request, which stays selected if the order changes."""
    opened: str | None = None
    """Id of the request whose trace is open."""
    trace: RequestTrace | None = None
    problem: str = ""
    page: TopOptions = field(default_factory=TopOptions)
    """The part of the open trace that is scrolled to."""

    def press(self, key: Key, num_shown: int) -> bool:
        """Handle a key. Return False if it ends the display."""
        if key == "quit":
            return False
        if self.opened is not None:
            if key == "back":
                self.opened = self.trace = None
            else:
                self.page = press(self.page, key, [], num_shown) or self.page
        elif key == "sort":
            show = _LISTS[(_LISTS.index(self.query.show) + 1) % len(_LISTS)]
            self.query, self.found, self.selected = replace(self.query, show=show), None, None
        elif self.found is not None and self.found.timelines:
            number = self._number()
            if key == "open":
                self.opened, self.page = id_of(self.found.timelines[number]), TopOptions()
            number = min(max(number + _STEPS.get(key, 0), 0), len(self.found.timelines) - 1)
            self.selected = _key(self.found.timelines[number])
        return True

    def draw(self, width: int, height: int) -> tuple[Text, int]:
        """Return the text for a terminal of this size, and the number of its lines that scroll."""
        problem = wrapped(printable(self.problem), width) if self.problem else []
        if self.opened is not None:
            lines = [f"request {printable(self.opened)}"] if self.trace is None else trace_lines(self.trace, width)
            text, self.page, num_shown = draw_page([*problem, *lines], self.page, width, height)
            return text, num_shown
        if self.found is None:
            return Text("\n").join(map(Text, [*problem, f"{self.query.show}: waiting for the workers"])), 1
        table, number = list_table(self.found, width), self._number()
        rows = [Text(line, "reverse" if i == number else "") for i, row in enumerate(table.rows) for line in row]
        ends = sum(map(len, table.rows[: number + 1]))
        head = [*problem, *list_notes(self.query.show, self.found, width), "", *([table.head] if table.head else [])]
        room = max(height - len(head) - 1, 1)
        shown = rows[max(ends - room, 0) : max(ends, room)]
        blank = [Text()] * (room - len(shown))
        return Text("\n").join([*map(Text, head), *shown, *blank, Text(_KEYS[:width], "dim")][-height:]), room

    def _number(self) -> int:
        """Return the position of the selected request in the list, or 0."""
        keys = [_key(each) for each in self.found.timelines] if self.found is not None else []
        return keys.index(self.selected) if self.selected in keys else 0


def _key(timeline: WorkerTimeline) -> tuple[object, ...]:
    return timeline.client, timeline.request_id, timeline.child, timeline.attempt, timeline.worker


async def browse(rb: Client, query: RequestQuery) -> None:
    """Show the list on the terminal until a key or a signal ends it. If a read fails, show the error and continue."""
    browser = Browser(query)
    wanted = asyncio.Event()

    async def read() -> None:
        while True:
            began = time.monotonic()
            wanted.clear()
            await _read(rb, browser)
            events.wake()
            try:
                async with asyncio.timeout(max(began + READ_EVERY_S - time.monotonic(), 0)):
                    await wanted.wait()
            except TimeoutError:
                continue

    with held_logs(), FullScreen() as screen, Events(screen).listening() as events:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="requests.read")
            is_open = True
            while is_open:
                text, num_shown = browser.draw(*screen.size)
                screen.show(text)
                await events.wait_until(float("inf"))
                for key in events.pop_keys():
                    before = browser.query, browser.opened
                    is_open = is_open and browser.press(key, num_shown)
                    if before != (browser.query, browser.opened):
                        wanted.set()
            reading.cancel()


async def _read(rb: Client, browser: Browser) -> None:
    query, opened = browser.query, browser.opened
    try:
        if opened is not None:
            trace = await rb.fleet.timelines(opened, model=query.model)
            if browser.opened == opened and trace.timelines:
                browser.trace = trace
        else:
            found = await query.read(rb.fleet)
            if browser.query == query:
                browser.found = found
        browser.problem = ""
    except RollbusError as exc:
        browser.problem = str(exc)
