"""The deadlines of the open calls of a client. Runs on the bus thread."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
INTERVAL_S: Final = 0.01
"""Seconds by which a call may end after its deadline."""


class Deadlines(Generic[T]):
    """Calls `on_due` for each item at its deadline, unless it is removed before.

    Items with deadlines in the same interval share a timer: one for each would be an eighth of the memory of an open
    call.
    """

    def __init__(self, on_due: Callable[[T], None]) -> None:
        self._on_due = on_due
        # By number of the interval, at whose end they are due.
        self._due: dict[int, tuple[asyncio.TimerHandle, dict[T, None]]] = {}

    def add(self, item: T, deadline_s: float) -> None:
        """Add an item with its deadline on `time.monotonic()`."""
        number = math.ceil(deadline_s / INTERVAL_S)
        due = self._due.get(number)
        if due is None:
            delay_s = max(number * INTERVAL_S - time.monotonic(), 0)
            timer = asyncio.get_running_loop().call_later(delay_s, self._end, number)
            due = self._due[number] = timer, {}
        due[1][item] = None

    def remove(self, item: T, deadline_s: float) -> None:
        """Remove an item that was added with this deadline, if it is not due yet."""
        number = math.ceil(deadline_s / INTERVAL_S)
        timer, items = self._due.get(number, (None, {}))
        items.pop(item, None)
        if timer is not None and not items:
            timer.cancel()
            del self._due[number]

    def _end(self, number: int) -> None:
        for item in self._due.pop(number)[1]:
            self._on_due(item)
