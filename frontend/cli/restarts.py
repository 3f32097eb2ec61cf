"""Decides when a process that has ended is started again. Time is passed in; nothing here waits."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from ...schemas.exit_codes import EXIT_DUPLICATE_WORKER

__all__ = ["RestartRule", "Restarts"]

FINAL_CODES: Final = frozenset({0, 2, EXIT_DUPLICATE_WORKER})
"""Exit codes after which a restart changes nothing: stopped as told, a wrong option, a name that is taken."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """How often a process is started again, and how fast."""

    first_delay_s: float = 1.0
    """Doubles with each restart: what ended a process at its start is seldom over at once."""
    max_delay_s: float = 60.0
    max_restarts: int = 5
    """Within `window_s`: a process that ends as often as that needs a person."""
    window_s: float = 600.0
    """A process that has lived for as long starts anew with `first_delay_s`."""


class Restarts:
    """The restarts of one process."""

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._delay_s = rule.first_delay_s
        self._at: deque[float] = deque(maxlen=rule.max_restarts)

    def __str__(self) -> str:
        """How many of those that are allowed there were, for people."""
        rule = self._rule
        return f"{len(self._at)} of {rule.max_restarts} restarts in {rule.window_s / 60:g} minutes"

    def delay_s(self, exit_code: int, *, lived_s: float, now: float) -> float | None:
        """Return the seconds until the process is started again; None if it stays ended.

        Args:
            exit_code: of the process; negative: the signal that killed it.
            lived_s: seconds from its start to its end.
            now: when it ended.
        """
        rule = self._rule
        while self._at and now - self._at[0] >= rule.window_s:
            self._at.popleft()
        if exit_code in FINAL_CODES or len(self._at) >= rule.max_restarts:
            return None
        if lived_s >= rule.window_s:
            self._delay_s = rule.first_delay_s
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, rule.max_delay_s)
        self._at.append(now)
        return delay_s
