"""Decides when a process that has ended is started again. Callers pass the current time, and no function waits."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from ...schemas.exit_codes import EXIT_DUPLICATE_WORKER

__all__ = ["RestartRule", "Restarts"]

FINAL_CODES: Final = frozenset({0, 2, EXIT_DUPLICATE_WORKER})
"""Exit codes after which a restart cannot help: a requested stop, a wrong option, a worker id in use."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Limits for the number of restarts of a process and for the delays before them."""

    first_delay_s: float = 1.0
    """Seconds before the first restart. Each restart doubles the delay, because the cause of a failed start often
    lasts."""
    max_delay_s: float = 60.0
    max_restarts: int = 5
    """Maximum number of restarts within `window_s`. A process that ends more often needs an operator."""
    window_s: float = 600.0
    """Seconds. After a process has run for this time, its next delay is `first_delay_s` again."""


class Restarts:
    """The restarts of one process."""

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._delay_s = rule.first_delay_s
        self._at: deque[float] = deque(maxlen=rule.max_restarts)

    def __str__(self) -> str:
        """Return the number of restarts and the limit as text."""
        rule = self._rule
        return f"{len(self._at)} of {rule.max_restarts} restarts in {rule.window_s / 60:g} minutes"

    @property
    def current(self) -> str:
        """The number of the last restart, as text."""
        return f"restart {len(self._at)} of {self._rule.max_restarts}"

    def delay_s(self, exit_code: int, *, lived_s: float, now: float) -> float | None:
        """Return the seconds until the process is started again, or None if it is not started again.

        Args:
            exit_code: exit code of the process. A negative value is the number of the signal that killed it.
            lived_s: seconds from the start of the process to its end.
            now: time of the end of the process.
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
