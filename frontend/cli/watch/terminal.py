"""Shows text that changes on the whole terminal, until the user quits: `rollbus top`, and pages with keys that scroll.

The terminal shows the alternate screen and gives keys without Enter. The end restores everything.
"""

import argparse
import asyncio
import logging
import math
import os
import shutil
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .... import bus
from ....bus import BusBroken, Client, FleetState
from ....bus.client.client import watch_fleet
from ....bus.client.fleet_state import FleetWatch
from ....bus.thread_calls import is_set_within
from ....schemas.errors import RollbusError
from ...follow import Heard, RecordedReader
from ..console import print_json, write
from ..exits import ExitCode
from ..options import connect, refuse_options
from .top import Key, KeyReader, Page, TopOptions, TopView, choose, draw, print_top, top_as_json

FIRST_READ_S: Final = 0.5
"""Seconds for NATS to answer before the first display. A healthy server answers in milliseconds."""
READ_EVERY_S: Final = 1.0
"""Seconds between two reads. Workers publish presence at the same interval."""


@asynccontextmanager
async def following(watch: FleetWatch) -> AsyncIterator[Callable[[], Awaitable[TopView]]]:
    """Follow a fleet while the block lasts. Yield a function that returns the known state immediately.

    This sends nothing to workers, which publish presence every second. NATS has half a second to answer first.
    """
    heard, recorded = Heard(), RecordedReader(lists_clients=False)
    has_read, unread, heard_at = asyncio.Event(), "", time.time()

    async def read() -> None:
        nonlocal unread
        while True:
            unread = ""
            try:
                await recorded.read(watch)
            except RollbusError as exc:
                # The presence of the workers is still valid.
                unread = f"cannot read the queues: {exc}"
            has_read.set()
            await asyncio.sleep(READ_EVERY_S)

    async def refresh() -> TopView:
        nonlocal heard_at
        await heard.update(watch)
        known, now = recorded.latest, time.time()
        if watch.problem is None:
            heard_at, problem = now, unread or known.problem
        else:
            problem = f"{watch.problem}; this is what was known {now - heard_at:.0f} s ago"
        state = FleetState(
            fleet=watch.fleet,
            workers=tuple(each.presence for each in heard.workers.values()),
            queues=known.queues,
            queue_problems=known.queue_problems,
            desired=known.desired,
        )
        return TopView(state, heard.rates, now, problem)

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(), name="top.read")
        await is_set_within(has_read, FIRST_READ_S)
        yield refresh
        reading.cancel()


MAX_HELD_LOGS: Final = 20
"""Limit on log lines that are held until the screen is left. Older lines are discarded."""


def is_capable() -> bool:
    """Return True if stdout is a terminal on which lines can change in place."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class _LogBuffer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=MAX_HELD_LOGS)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def held_logs() -> Iterator[None]:
    """Hold the log while the block lasts, if stderr is a terminal. Otherwise the log would overwrite the screen."""
    if not sys.stderr.isatty():
        yield
        return
    root, held = logging.getLogger(), _LogBuffer()
    before = root.handlers[:]
    root.handlers[:] = [held]
    try:
        yield
    finally:
        root.handlers[:] = before
        for record in held.records:
            root.handle(record)


SAMPLE_S: Final = 2.5
"""Seconds for one snapshot. Rates need two presence messages of each worker."""
LOOK_EVERY_S: Final = 0.5
MAX_KEYS: Final = 256
"""Limit on unhandled keys. Only a paste sends more."""
READ_BYTES: Final = 1024
_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def read_view(rb: Client) -> TopView:
    """Follow the fleet for `SAMPLE_S` seconds and return the state at the end."""
    async with following(watch_fleet(rb)) as refresh:
        ends = time.monotonic() + SAMPLE_S
        while time.monotonic() < ends:
            await refresh()
            await asyncio.sleep(LOOK_EVERY_S)
        return await refresh()


async def run_top(rb: Client, options: TopOptions, interval_s: float) -> None:
    """Show the fleet on the terminal until a key or a signal ends it. If the server is down, show that and continue."""
    page = Page()

    def draw_view(width: int, height: int) -> Text:
        return draw(view, options, page, width, height)

    def press_key(key: Key) -> bool:
        nonlocal options
        chosen = choose(options, key, sorted({worker.model for worker in view.state.workers}))
        if chosen is not None:
            options, page.first = chosen, 0
        return page.press(key)

    with open_screen() as screen:
        async with following(watch_fleet(rb)) as refresh:
            began = time.monotonic()
            goes_on = True
            while goes_on:
                looked_at = time.monotonic()
                view = await refresh()
                # Update more often at first, to show workers that answer late and the first rates.
                wait_s = interval_s if looked_at - began > SAMPLE_S else min(interval_s, LOOK_EVERY_S)
                goes_on = await screen.show(draw_view, press_key, looked_at + wait_s)


@contextmanager
def open_screen() -> Iterator["FullScreen"]:
    """Use the whole terminal while the block lasts: show the alternate screen, and receive keys and signals.

    The log is held. The end restores the settings of the terminal.
    """
    with held_logs():
        screen = FullScreen()
        # A signal while the screen is taken or given back must not end this process with the terminal as it is then.
        with screen.listening():
            try:
                screen.take()
                yield screen
            finally:
                screen.give_back()


class FullScreen:
    """The terminal's alternate screen, with its keys, signals and changes of size on the event loop."""

    def __init__(self) -> None:
        self._console = Console(markup=False, highlight=False)
        self._stdin = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._live: Live | None = None
        self._reader = KeyReader()
        self._pressed: deque[Key] = deque(maxlen=MAX_KEYS)
        self._changed = asyncio.Event()

    async def show(
        self, draw_text: Callable[[int, int], Text], press_key: Callable[[Key], bool], ends: float = math.inf
    ) -> bool:
        """Show a text until `ends` on `time.monotonic()`, and draw it again at each event.

        Args:
            draw_text: returns the text for a terminal of this width and height.
            press_key: handles a key. Returns False if the key ends the display.

        Returns:
            False if a key has ended the display.
        """
        while True:
            if self._live is not None:
                self._live.update(draw_text(*self._console.size), refresh=True)
            if not await is_set_within(self._changed, None if math.isinf(ends) else max(ends - time.monotonic(), 0)):
                return True
            self._changed.clear()
            while self._pressed:
                if not press_key(self._pressed.popleft()):
                    return False

    def wake(self) -> None:
        """Draw again, because there is something new to show."""
        self._changed.set()

    def take(self) -> None:
        """Save the settings of the terminal and enter the alternate screen."""
        if self._stdin is not None:
            self._before = termios.tcgetattr(self._stdin)
            tty.setcbreak(self._stdin, termios.TCSANOW)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def give_back(self) -> None:
        """Leave the alternate screen and restore the settings."""
        try:
            if self._live is not None:
                self._live.stop()
        finally:
            self._live = None
            if self._stdin is not None and self._before is not None:
                # TCSANOW does not wait for pending output, which a stopped terminal would not accept.
                termios.tcsetattr(self._stdin, termios.TCSANOW, self._before)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive events while the block lasts."""
        loop = asyncio.get_running_loop()
        for number in _ENDS:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGWINCH, self.wake)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        if self._stdin is not None:
            loop.add_reader(self._stdin, self._read, self._stdin)
            # uvloop makes stdin non-blocking, and with it stdout, which is the same terminal. A write to a slow
            # terminal would then fail.
            os.set_blocking(self._stdin, True)
        try:
            yield
        finally:
            if self._stdin is not None:
                loop.remove_reader(self._stdin)
            for number in (*_ENDS, signal.SIGWINCH, signal.SIGTSTP):
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self._pressed.append("quit")
        self.wake()

    def _suspend(self) -> None:
        """Restore the terminal and stop this process as Ctrl-Z does. Continue when the process continues."""
        self.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.take()
        self.wake()

    def _read(self, stdin: int) -> None:
        try:
            data = os.read(stdin, READ_BYTES)
        except OSError:  # Linux raises this if the terminal is closed
            data = b""
        self._pressed.extend(self._reader.read(data) if data else ["quit"])
        self.wake()


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
    page = Page()

    async def read() -> None:
        nonlocal shown, problem
        async for state in states:
            if isinstance(state, BusBroken):
                problem = str(state)
            else:
                shown, problem = state, ""
            screen.wake()

    def draw_state(width: int, height: int) -> Text:
        lines = lines_of(shown, width) if shown is not None else ["waiting for the state of the fleet"]
        return page.draw(map(Text, lines), width, height, [Text(problem)] if problem else ())

    with open_screen() as screen:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="status.read")
            await screen.show(draw_state, page.press)
            reading.cancel()
    if shown is not None:
        write("\n".join(lines_of(shown, shutil.get_terminal_size().columns)))


async def run(args: argparse.Namespace) -> int:
    """Show the fleet until the user quits, or print it once."""
    if args.once or args.json:
        refuse_options(args, ["interval"], "with --once or --json")
    options = TopOptions(sort=args.sort, model=args.model)
    async with connect(args) as rb:
        if is_capable() and not (args.once or args.json):
            await run_top(rb, options, args.interval)
            return ExitCode.OK
        view = await read_view(rb)
    if args.json:
        print_json(top_as_json(view, options))
    elif view.state.workers:
        print_top(view, options)
    if not view.state.workers:
        raise bus.NoWorkers(message="no worker is live")
    return ExitCode.OK
