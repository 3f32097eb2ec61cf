"""Durations by model, in a histogram with fixed buckets. Its size does not depend on the number of durations."""

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
"""Upper bounds of the buckets in seconds, from one round trip to the longest usual request."""
MAX_MODELS: Final = 256
"""Maximum number of models in a client's counters, more than one client uses. Beyond it, the counters of the model that
was counted first are removed. They begin at 0 again with its next request."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one kind."""

    counts: tuple[int, ...]
    """Number of durations in each bucket: up to its bound in `BOUNDS_S` and above the previous bound. The last number
    counts the durations above all bounds."""
    total_s: float
    """Sum of all durations in seconds."""

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of durations up to it) pairs. The bound of the last pair is infinity."""
        return list(zip((*BOUNDS_S, math.inf), accumulate(self.counts), strict=True))


class DurationsByModel:
    """Counts durations by model. One thread writes, any thread may copy."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._totals_s: dict[str, float] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<DurationsByModel {' '.join(f'{model}:{sum(c)}' for model, c in self._counts.items()) or 'empty'}>"

    def add(self, model: str, seconds: float) -> None:
        """Count one duration."""
        counts = self._counts.get(model)
        if counts is None:
            if len(self._counts) >= MAX_MODELS:
                first = next(iter(self._counts))
                del self._counts[first], self._totals_s[first]
            self._totals_s[model] = 0.0
            # Add the counts last: a thread that copies meanwhile then finds a sum for every model with counts.
            counts = self._counts[model] = [0] * (len(BOUNDS_S) + 1)
        counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._totals_s[model] += seconds

    def copy(self) -> dict[str, Durations]:
        """Return a copy of all counts."""
        counted = [(model, counts, self._totals_s.get(model)) for model, counts in list(self._counts.items())]
        # A model without a sum was removed meanwhile.
        return {model: Durations(tuple(counts), total) for model, counts, total in counted if total is not None}
