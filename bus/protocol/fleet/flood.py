"""Decides whether the messages of a subscription are a flood, and names the subject with most of them."""

from collections import Counter
from collections.abc import Callable
from typing import Final

__all__ = ["DROP_S", "MAX_FROM_ALL", "MAX_FROM_ONE", "FloodMeter"]

MAX_FROM_ONE: Final = 500
"""Messages of one sender in a second, far above any honest sender. Reading as many takes a percent of a core."""
MAX_FROM_ALL: Final = 5_000
"""Messages of all senders in a second. Thousands of clients may connect at once, and each publishes presence. On a
server with users, nobody has several names."""
DROP_S: Final = 5.0
"""Seconds for which a flooded subscription is dropped."""


class FloodMeter:
    """Counts the messages of one subscription in each second.

    Args:
        num_useful: returns the number of messages since the start that were worth their cost, for example accepted
            requests. These do not count.
    """

    def __init__(self, num_useful: Callable[[], int] = lambda: 0) -> None:
        self._num_useful = num_useful
        self._counts: Counter[str] = Counter()
        self._num_messages = self._useful_before = 0
        self._ends_at = 0.0
        self.is_flooded = False
        """True from the flood on until `reset`."""

    def __repr__(self) -> str:
        """Return one line with the number of messages."""
        return f"<FloodMeter {self._num_messages} is_flooded={self.is_flooded}>"

    def reset(self, now: float) -> None:
        """Begin a new second."""
        self._counts.clear()
        self._num_messages, self._useful_before = 0, self._num_useful()
        self._ends_at, self.is_flooded = now + 1.0, False

    def add(self, subject: str, now: float) -> bool:
        """Count a message on `subject`, which has the name of its sender. Return True if it makes a flood."""
        if now >= self._ends_at:
            self.reset(now)
        self._counts[subject] += 1
        self._num_messages += 1
        above = max(self._counts[subject] - MAX_FROM_ONE, self._num_messages - MAX_FROM_ALL)
        self.is_flooded = above > 0 and above > self._num_useful() - self._useful_before
        return self.is_flooded

    def describe(self, subscription: str) -> str:
        """Return the flood as text for people, with the subject that most messages had."""
        (subject, count), *_ = self._counts.most_common(1) or [(subscription, 0)]
        return f"{count} of {self._num_messages} messages in a second on {subject}: not read for {DROP_S:g} s"
