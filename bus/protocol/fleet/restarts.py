"""The delays before the restarts of one process, for all supervisors of workers."""

from typing import Final

FIRST_DELAY_S: Final = 1.0
"""Seconds before the first restart. Each restart doubles the delay, because the cause of a failed start often lasts."""
MAX_DELAY_S: Final = 60.0
STABLE_S: Final = 600.0
"""Seconds. After a process has lived for this time, its next delay is the first one again."""


class RestartDelays:
    """Chooses the delays. The caller waits."""

    def __init__(self, first_s: float = FIRST_DELAY_S) -> None:
        self._first_s = self._next_s = first_s

    def next_s(self, lived_s: float, *, was_asked: bool = False) -> float:
        """Return the seconds until the next start of a process that has lived for so long.

        Args:
            was_asked: a command or a signal asked for the restart, so it is no failure and changes no later delay.
        """
        if was_asked:
            return self._first_s
        if lived_s >= STABLE_S:
            self._next_s = self._first_s
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_DELAY_S)
        return delay_s
