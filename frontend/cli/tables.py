"""Lays out every table of the command line, equally for terminals and pipes.

A table fits its width, and nothing is cut or shortened. Columns whose cells are all zero or empty are left out. Cells
that do not fit stand on lines below their row, with the title of their column. Only a word that is longer than the
width makes a longer line. Figures that were measured in several rounds have one format in tables and JSON.
"""

import os
import platform
import re
import shutil
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from rich.cells import cell_len

from .console import write

NONE: Final = "-"
"""Cell without a value."""
GAP: Final = 2
"""Blanks between columns, and before the lines below a row."""
MAX_CELL: Final = 32
"""Maximum width of a cell in its column if the table is too wide. A wider cell stands on a line of its own."""
MIN_TEXT: Final = 30
"""Minimum width of the last column if its text is wrapped."""
_NOTHING: Final = re.compile(r"-?|0+([.,]0+)?( ?(%|m?s|[KMG]iB))?")
_NUMBER: Final = re.compile(r"-?|[\d.,/]+( ?(%|m?s|[KMG]iB))?")


class TableLines(NamedTuple):
    """The lines of a table."""

    head: str
    """The titles. Empty if all cells stand on lines of their own."""
    rows: list[list[str]]
    """The lines of each row."""

    @property
    def lines(self) -> list[str]:
        """All lines."""
        return [*([self.head] if self.head else []), *(line for row in self.rows for line in row)]


def printable(text: str) -> str:
    """Return text of a peer with control characters escaped, because a terminal would interpret them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout."""
    write(table_text(columns, rows))


def print_text(text: str) -> None:
    """Print a line on stdout, wrapped between words as the tables are."""
    write("\n".join(wrapped(text, shutil.get_terminal_size().columns)))


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table as text. The default width is that of the terminal, or 80 in a pipe without $COLUMNS."""
    return "\n".join(lay_out(columns, rows, width or shutil.get_terminal_size().columns).lines)


def wrapped(text: str, width: int) -> list[str]:
    """Return `printable` text in lines of at most `width` columns, broken only between words."""
    lines = [""]
    for word in printable(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_len(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, spare: Sequence[str] = ()) -> TableLines:
    """Lay out a table.

    Args:
        columns: titles of the columns. The last column may be a text, which is wrapped.
        spare: columns that are left out, in this order, if the table is too wide.
    """
    return _Table(columns, rows, width, spare).layout()


class _Table:
    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, spare: Sequence[str]) -> None:
        self._titles = columns
        self._rows = [[printable(cell) for cell in row] for row in rows]
        self._width = width
        filled = {i for row in self._rows for i, cell in enumerate(row) if not _NOTHING.fullmatch(cell)}
        self._shown = [i for i in range(len(columns)) if i == 0 or i in filled or not rows]
        self._is_number = {i: all(_NUMBER.fullmatch(row[i]) for row in self._rows) for i in self._shown}
        self._widths = {i: self._widest(i, None) for i in self._shown}
        """Widths of the columns beside each other. Cells of other columns stand below their row."""
        if self._overhang() > 0:
            self._narrow(spare)

    def _widest(self, i: int, limit: int | None) -> int:
        """Return the width of a column, without the cells that exceed `limit`; 0 if no cell is left."""
        cells = [size for row in self._rows if (size := cell_len(row[i])) <= (limit or size)]
        return max([cell_len(self._titles[i]), *cells]) if cells or not self._rows else 0

    def _overhang(self) -> int:
        return sum(self._widths.values()) + GAP * (len(self._widths) - 1) - self._width

    def _narrow(self, spare: Sequence[str]) -> None:
        """Move wide cells below their rows, then columns from the right until the others fit."""
        last = self._shown[-1]
        for i in self._shown:
            self._widths[i] = min(self._widths[i], MIN_TEXT) if i == last else self._widest(i, MAX_CELL)
        # A last column that is not spare can stand below.
        slack = 0 if self._titles[last] in spare else self._widths[last] + GAP
        for i in map(self._titles.index, spare):
            if self._overhang() > slack and i in self._shown:
                self._shown.remove(i)
                del self._widths[i]
        self._widths = {i: size for i, size in self._widths.items() if size}
        while self._overhang() > 0 and len(self._widths) > 1:
            del self._widths[max(self._widths)]
        if last in self._widths:
            self._widths[last] = min(self._widest(last, None), self._widths[last] - self._overhang())

    def layout(self) -> TableLines:
        """Return the lines."""
        head = self._join([self._titles[i] for i in self._widths])
        return TableLines(head, [[*self._lines(row)] for row in self._rows])

    def _join(self, cells: Sequence[str]) -> str:
        """Return cells in their columns, numbers on the right."""
        line = []
        for (i, size), cell in zip(self._widths.items(), cells, strict=True):
            blanks = " " * (size - cell_len(cell))
            line.append(blanks + cell if self._is_number[i] else cell + blanks)
        return (" " * GAP).join(line).rstrip()

    def _lines(self, row: Sequence[str]) -> Iterator[str]:
        inside, below = {}, [i for i in self._shown if i not in self._widths]
        for i, size in self._widths.items():
            lines = wrapped(row[i], size) if i == self._shown[-1] else [row[i]]
            if max(map(cell_len, lines)) <= size:
                inside[i] = lines
            else:
                below.append(i)
        is_first = not any(row[i] for i in inside)
        for number in range(0 if is_first else max(map(len, inside.values()))):
            cells = [inside[i][number] if number < len(inside.get(i, ())) else "" for i in self._widths]
            yield self._join(cells)
        for text in self._below(row, sorted(below)):
            for number, line in enumerate(wrapped(text, self._width - 2 * GAP)):
                yield " " * (0 if is_first else 2 * GAP if number else GAP) + line
                is_first = False

    def _below(self, row: Sequence[str], below: Sequence[int]) -> Iterator[str]:
        """Yield the texts below a row: each wide cell by itself, and the others together."""
        pairs = []
        for i in below:
            if not _NOTHING.fullmatch(row[i]):
                pair = f"{self._titles[i]}: {row[i]}" if self._titles[i] else row[i]
                if cell_len(row[i]) > MAX_CELL:
                    yield pair
                else:
                    pairs.append(pair)
        if pairs:
            yield "; ".join(pairs)


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
    return iter([*sides] * rounds)


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
