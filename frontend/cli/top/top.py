"""`rollbus top`: shows the fleet on a terminal until the user quits, or once."""

import asyncio
import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ....bus import Client
from ....bus.client.fleet_watch import watch_fleet
from .follower import following
from .full_screen import FullScreen, held_logs
from .options import Key, KeyReader, TopOptions, press
from .screen import Screen, TopView, draw

__all__ = ["Events", "read_view", "run_top"]

SAMPLE_S: Final = 2.5
"""Seconds for one snapshot. Rates need two presence messages of each worker."""
LOOK_EVERY_S: Final = 0.5
MAX_KEYS: Final = 256
"""Limit on unhandled keys. Only a paste sends more."""
READ_BYTES: Final = 1024
_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def read_view(rb: Client) -> TopView:
    """Follow the fleet for `SAMPLE_S` seconds and return the state at the end."""
    async with following(watch_fleet(rb)) as follower:
        ends = time.monotonic() + SAMPLE_S
        while time.monotonic() < ends:
            await follower.refresh()
            await asyncio.sleep(LOOK_EVERY_S)
        return await follower.refresh()


async def run_top(rb: Client, options: TopOptions, interval_s: float) -> None:
    """Show the fleet on the terminal until a key or a signal ends it. If the server is down, show that and continue."""
    with held_logs(), FullScreen() as screen, Events(screen).listening() as events:
        async with following(watch_fleet(rb)) as follower:
            began = time.monotonic()
            while True:
                looked_at = time.monotonic()
                view = await follower.refresh()
                # Update more often at first, to show workers that answer late and the first rates.
                wait_s = interval_s if looked_at - began > SAMPLE_S else min(interval_s, LOOK_EVERY_S)
                chosen = await _show_until(view, options, events, screen, looked_at + wait_s)
                if chosen is None:
                    return
                options = chosen


async def _show_until(
    view: TopView, options: TopOptions, events: "Events", screen: FullScreen, ends: float
) -> TopOptions | None:
    """Show a view, and redraw it at each key and change of size. Return the choices, or None to end."""
    while True:
        shown = draw(view, options, *screen.size)
        screen.show(shown.text)
        options = shown.options
        if not await events.wait_until(ends):
            return options
        chosen = _after_keys(view, shown, events)
        if chosen is None:
            return None
        options = chosen


def _after_keys(view: TopView, shown: Screen, events: "Events") -> TopOptions | None:
    models = sorted({worker.model for worker in view.state.workers})
    options: TopOptions | None = shown.options
    for key in events.pop_keys():
        if options is not None:
            options = press(options, key, models, shown.rows)
    return options


class Events:
    """Receives keys, signals and changes of the terminal's size on the event loop."""

    def __init__(self, screen: FullScreen) -> None:
        self._screen = screen
        self._reader = KeyReader()
        self._pressed: deque[Key] = deque(maxlen=MAX_KEYS)
        self._changed = asyncio.Event()

    def pop_keys(self) -> list[Key]:
        """Return the keys that were pressed since the last call."""
        pressed = [*self._pressed]
        self._pressed.clear()
        return pressed

    def wake(self) -> None:
        """End the current wait, because there is something new to show."""
        self._changed.set()

    async def wait_until(self, ends: float) -> bool:
        """Return True as soon as there is an event, or False at `ends` on `time.monotonic()`."""
        try:
            async with asyncio.timeout(None if math.isinf(ends) else max(ends - time.monotonic(), 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    @contextmanager
    def listening(self) -> Iterator["Events"]:
        """Receive events while the block lasts."""
        loop = asyncio.get_running_loop()
        for number in _ENDS:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        if self._screen.keys is not None:
            loop.add_reader(self._screen.keys, self._read)
            # uvloop makes stdin non-blocking, and with it stdout, which is the same terminal. A write to a slow
            # terminal would then fail.
            os.set_blocking(self._screen.keys, True)
        try:
            yield self
        finally:
            if self._screen.keys is not None:
                loop.remove_reader(self._screen.keys)
            for number in (*_ENDS, signal.SIGWINCH, signal.SIGTSTP):
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self._pressed.append("quit")
        self._changed.set()

    def _suspend(self) -> None:
        self._screen.suspend()
        self._changed.set()

    def _read(self) -> None:
        keys = self._screen.keys
        try:
            data = b"" if keys is None else os.read(keys, READ_BYTES)
        except OSError:  # Linux raises this if the terminal is closed
            data = b""
        if not data:
            self._end()
            return
        self._pressed.extend(self._reader.read(data))
        self._changed.set()
