"""Joins rows of routed experts from pieces, without gaps, duplicate rows or narrowed ids."""

import bisect
from typing import Any, Literal

import numpy as np

from ..schemas.rows import Rows
from .checks import check_integer, check_rows
from .errors import StitchError

__all__ = ["Overlap", "RowStitcher"]

Overlap = Literal["refuse", "first", "last"]
"""Handling of two pieces with a row for the same position. `refuse`: they must agree. Otherwise the first or the last
row is kept."""
OVERLAPS = ("refuse", "first", "last")


class RowStitcher:
    """Contiguous rows in parts that do not overlap. `join` copies them; before that, only small remainders are copied.

    A piece touches only the parts that it overlaps, so the cost of many pieces is that of their rows.
    """

    def __init__(self, overlap: Overlap) -> None:
        if overlap not in OVERLAPS:
            raise StitchError(f"overlap is {overlap!r}; allowed: {', '.join(OVERLAPS)}")
        self._overlap = overlap
        self.layout: tuple[int, int] | None = None
        """Layers and top-k. None until a piece was added."""
        self._dtype: np.dtype[Any] = np.dtype("u1")
        self._parts: list[Rows] = []
        """Parts in order of their positions, each with at least one row."""
        self._starts: list[int] = []
        """Position of the first row of each part."""
        self._empty_start = 0
        """Position of the first piece while no piece has rows."""

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self._starts[0] if self._starts else self._empty_start

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self._starts[-1] + len(self._parts[-1]) if self._starts else self._empty_start

    def add(self, where: str, start: int, rows: Rows) -> None:
        """Add a piece that begins at position `start`. An error leaves this object unchanged.

        Raises:
            StitchError: the piece is not valid, leaves a gap or contradicts earlier rows. The message begins with
                `where`.
        """
        start = check_integer(StitchError, f"{where}: start", start, 0)
        layout = self._check_layout(where, start, rows)
        if self._parts and len(rows):
            self._check_reach(where, start, start + len(rows))
            if self._overlap == "refuse":
                self._check_agreement(where, start, rows)
            if self._overlap == "last":
                self._replace(start, rows)
            else:
                self._extend(start, rows)
        elif len(rows):
            self._starts, self._parts = [start], [rows]
        elif self.layout is None:
            self._empty_start = start
        self.layout = layout
        self._dtype = np.result_type(self._dtype, rows.dtype)

    def join(self, *, copy: bool = True) -> Rows:
        """Return all rows in the widest dtype of any piece. Without `copy`, a single part is returned as a view."""
        if self.layout is None:
            raise StitchError("there are no pieces; allowed: one or more, also without rows")
        if not self._parts:
            return np.empty((0, *self.layout), self._dtype)
        if len(self._parts) == 1 and not copy:
            return self._parts[0].astype(self._dtype, copy=False)
        return np.concatenate(self._parts, dtype=self._dtype)

    def _extend(self, start: int, rows: Rows) -> None:
        """Add the rows of positions without a row, before and after the present rows."""
        head, tail = self.start - start, self.end - start
        if tail < len(rows):
            self._starts.append(self.end)
            self._parts.append(_cut(rows, tail, len(rows)))
        if head > 0:
            self._starts.insert(0, start)
            self._parts.insert(0, _cut(rows, 0, head))

    def _replace(self, start: int, rows: Rows) -> None:
        """Add all rows. Of the parts that they overlap, the rows before and after them stay."""
        end = start + len(rows)
        starts, parts = [start], [rows]
        first, after = bisect.bisect_left(self._starts, start), bisect.bisect_left(self._starts, end)
        if after and self._starts[after - 1] + len(self._parts[after - 1]) > end:
            part = self._parts[after - 1]
            starts.append(end)
            parts.append(_cut(part, end - self._starts[after - 1], len(part)))
        if first and self._starts[first - 1] + len(self._parts[first - 1]) > start:
            first -= 1
            starts.insert(0, self._starts[first])
            parts.insert(0, _cut(self._parts[first], 0, start - self._starts[first]))
        self._starts[first:after] = starts
        self._parts[first:after] = parts

    def _held(self, start: int, end: int) -> list[Rows]:
        """Return the present rows of positions `start` to `end - 1` as views."""
        views = []
        for index in range(max(bisect.bisect_right(self._starts, start) - 1, 0), bisect.bisect_left(self._starts, end)):
            part, first = self._parts[index], self._starts[index]
            views.append(part[max(start - first, 0) : end - first])
        return views

    def _check_reach(self, where: str, start: int, end: int) -> None:
        if self.start <= end and start <= self.end:
            return
        missing = f"{self.end} to {start - 1}" if start > self.end else f"{end} to {self.start - 1}"
        raise StitchError(
            f"{where}: rows of positions {start} to {end - 1} leave a gap, {missing}; allowed: pieces that touch"
            f" those before them, {self.start} to {self.end - 1}"
        )

    def _check_layout(self, where: str, start: int, rows: Rows) -> tuple[int, int]:
        check_rows(StitchError, f"{where}: routed_experts", rows)
        layout = (rows.shape[1], rows.shape[2])
        if self.layout is not None and layout != self.layout:
            raise StitchError(
                f"{where}, from position {start}: {layout[0]} layers of top-{layout[1]}, after"
                f" {self.layout[0]} layers of top-{self.layout[1]}; allowed: one layout in all pieces"
            )
        return layout

    def _check_agreement(self, where: str, start: int, rows: Rows) -> None:
        """Check that rows of the same position name the same experts. The order within a top-k has no meaning."""
        position = max(start, self.start)
        for held in self._held(position, min(start + len(rows), self.end)):
            new = rows[position - start :][: len(held)]
            if not np.array_equal(held, new):
                differs = (np.sort(held, axis=2) != np.sort(new, axis=2)).any(axis=2)
                if differs.any():
                    row, layer = np.unravel_index(int(differs.argmax()), differs.shape)
                    raise StitchError(
                        f"{where}: its row for position {position + int(row)}, layer {int(layer)}, disagrees with"
                        f" an earlier one: {new[row, layer]} after {held[row, layer]}"
                    )
            position += len(held)


def _cut(rows: Rows, begin: int, end: int) -> Rows:
    """Return a view, or a copy if it is small, because a view keeps the whole piece in memory."""
    part = rows[begin:end]
    return part.copy() if len(part) * 2 < len(rows) else part
