"""How long things took, by model: a histogram in fixed buckets, small however much is counted."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

__all__ = ["BOUNDS_S", "MAX_MODELS", "Durations", "DurationsByModel"]

BOUNDS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
)
"""Upper ends of the buckets, in seconds: from a round trip to the longest that a request mostly may take."""
MAX_MODELS: Final = 256
"""Models that a client's counters tell apart, far more than a fleet has; what is of another is not counted."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one kind."""

    counts: tuple[int, ...]
    """How many went up to each of `BOUNDS_S`, and above the one before it; the last number is of those above all."""
    total_s: float
    """Their sum."""

    def cumulative(self) -> list[tuple[float, int]]:
        """How many took up to so many seconds; those of the last pair, up to infinity, are all."""
        return list(zip((*BOUNDS_S, math.inf), accumulate(self.counts), strict=True))


class DurationsByModel:
    """Counts durations; written by one thread, and copied by any."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._totals_s: dict[str, float] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<DurationsByModel {' '.join(f'{model}:{sum(c)}' for model, c in self._counts.items()) or 'empty'}>"

    def add(self, model: str, seconds: float) -> None:
        """Count one."""
        counts = self._counts.get(model)
        if counts is None:
            if len(self._counts) >= MAX_MODELS:
                return
            self._totals_s[model] = 0.0
            # Last: who copies meanwhile finds the sum of every model that it finds counts of.
            counts = self._counts[model] = [0] * (len(BOUNDS_S) + 1)
        counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._totals_s[model] += seconds

    def copy(self) -> dict[str, Durations]:
        """What was counted so far."""
        return {model: Durations(tuple(counts), self._totals_s[model]) for model, counts in list(self._counts.items())}
