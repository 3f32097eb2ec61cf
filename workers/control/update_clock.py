"""Where the time of an update of the weights goes. Plain values; the clock is passed in."""

from dataclasses import dataclass

from ...schemas.weights import UpdateTiming
from .staging import StageCost

__all__ = ["UpdateClock"]


@dataclass(slots=True)
class UpdateClock:
    """The instants of one update, on the monotonic clock."""

    stopped_at: float | None = None
    """When the requests stood still; None: nothing was replaced."""
    loaded_s: float = 0.0
    canary_s: float = 0.0

    def timing(self, seen_at: float, cost: StageCost, now: float) -> UpdateTiming | None:
        """Return where the time went of an update after which the engine goes on at `now`; None: nothing was replaced.

        Args:
            seen_at: when the worker read the command.
            cost: of the staging of its source.
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
