"""Figures that were measured several times, and how a table shows them."""

import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Spread", "digits", "percentile"]


@dataclass(frozen=True, slots=True)
class Spread:
    """What the rounds of one measurement gave."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The median of `values`, at least one, and their range."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self) -> str:
        """As a table has it: `median (low to high)`, or the median alone where all are the same."""
        shown = digits(self.median)
        median = f"{self.median:,.{shown}f}"
        return median if self.low == self.high else f"{median} ({self.low:,.{shown}f} to {self.high:,.{shown}f})"


def digits(value: float) -> int:
    """How many are worth showing behind the point: three figures at least."""
    return next((shown for shown, limit in enumerate((100, 10, 1)) if abs(value) >= limit), 3)


def percentile(values: "Sequence[float] | array[float]", percent: float) -> float:
    """The smallest of `values`, of which there must be some, that so many percent of them do not exceed."""
    return float(np.percentile(np.asarray(values), percent, method="inverted_cdf"))
