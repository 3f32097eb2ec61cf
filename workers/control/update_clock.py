"""Measures the phases of a weight update. The caller passes the time."""

from dataclasses import dataclass

from ...schemas.weights import UpdateTiming
from .staging import StageCost

__all__ = ["UpdateClock"]


@dataclass(slots=True)
class UpdateClock:
    """The times of one update."""

    stopped_at: float | None = None
    """Monotonic time at which the requests were stopped, or None if no weights were replaced."""
    loaded_s: float = 0.0
    canary_s: float = 0.0

    def timing(self, seen_at: float, cost: StageCost, now: float) -> UpdateTiming | None:
        """Return the timing of an update whose engine resumes at `now`, or None if no weights were replaced.

        Args:
            seen_at: monotonic time at which the worker read the command.
            cost: cost of staging the source of the command.
        """
        if self.stopped_at is None:
            return None
        return UpdateTiming(
            fetched_bytes=cost.fetched_bytes,
            staged_s=round(cost.staged_s, 3),
            waited_s=round(max(self.stopped_at - max(seen_at, cost.done_at), 0.0), 3),
            paused_s=round(max(now - self.stopped_at, 0.0), 3),
            loaded_s=round(self.loaded_s, 3),
            canary_s=round(self.canary_s, 3),
        )
