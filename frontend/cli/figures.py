"""Figures measured in several rounds, and their format in tables and JSON. All benchmarks use them."""

import os
import platform
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

__all__ = ["Spread", "Value", "as_json", "cell", "in_turns", "machine", "percentile", "spreads"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure over all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the median and range of `values`, which must not be empty."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self) -> str:
        """Return `median (low to high)` for a table, or only the median if all values are equal."""
        shown = _digits(self.median)
        median = f"{self.median:,.{shown}f}"
        return median if self.low == self.high else f"{median} ({self.low:,.{shown}f} to {self.high:,.{shown}f})"


Value = Spread | float | int | str
"""Content of a table cell."""


def in_turns(rounds: int, sides: Iterable[T]) -> Iterator[T]:
    """Yield every side once in each round, so that a slow phase of the machine affects all sides."""
    every = list(sides)
    for _ in range(rounds):
        yield from every


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the median and range of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: Spread.of([figures[name] for figures in rounds if name in figures]) for name in names}


def cell(value: Value) -> str:
    """Return a value as text with its significant digits."""
    if isinstance(value, Spread):
        return value.text()
    if isinstance(value, float):
        return f"{value:,.{_digits(value)}f}"
    return f"{value:,}" if isinstance(value, int) else value


def as_json(value: Value) -> object:
    """Return a value in JSON types. A spread becomes an object."""
    return asdict(value) if isinstance(value, Spread) else value


def _digits(value: float) -> int:
    """Return the number of decimals to show, so that at least three significant digits appear."""
    return next((shown for shown, limit in enumerate((100, 10, 1)) if abs(value) >= limit), 3)


def machine() -> str:
    """Return a description of the machine on which figures are measured."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def percentile(values: "Sequence[float] | array[float]", percent: float) -> float:
    """Return the smallest of `values` that `percent` percent of them do not exceed. `values` must not be empty."""
    return float(np.percentile(np.asarray(values), percent, method="inverted_cdf"))
