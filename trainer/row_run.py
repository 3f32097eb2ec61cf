"""Rows of routed experts that grow piece by piece, and never have a gap, a row twice, or a narrowed id."""

import bisect
from typing import Any, Literal

import numpy as np

from schemas.rows import Rows, dtype_of
from trainer.errors import StitchError

__all__ = ["Overlap", "RowRun"]

Overlap = Literal["refuse", "first", "last"]
"""Two pieces with a row for the same position: they must agree, or the first or the last of them counts."""
OVERLAPS = ("refuse", "first", "last")


class RowRun:
    """Contiguous rows in pieces that do not overlap. Nothing is copied until `join`."""

    def __init__(self, overlap: Overlap) -> None:
        if overlap not in OVERLAPS:
            raise StitchError(f"overlap is {overlap!r}; allowed: {', '.join(OVERLAPS)}")
        self._overlap = overlap
        self.start = 0
        """The position of the first row."""
        self.layout: tuple[int, int] | None = None
        """Layers and top_k; None until a piece was added."""
        self._dtype: np.dtype[Any] = np.dtype("u1")
        self._parts: list[Rows] = []
        self._ends: list[int] = []
        """Of each part: the position after its last row."""

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self._ends[-1] if self._ends else self.start

    def add(self, where: str, start: int, rows: Rows) -> None:
        """Take in a piece that begins at position `start`. After an error all is as it was before.

        Raises:
            StitchError: saying `where`.
        """
        layout = self._check_layout(where, start, rows)
        if self._parts and len(rows):
            self._check_reach(where, start, start + len(rows))
            if self._overlap == "refuse":
                self._check_agreement(where, start, rows)
            self._insert(start, rows)
        elif len(rows) or self.layout is None:
            self.start = start
            self._append([rows])
        self.layout = layout
        self._dtype = np.result_type(self._dtype, rows.dtype)

    def join(self, *, copy: bool = True) -> Rows:
        """All rows in the widest dtype that any piece had: one allocation, or without `copy` none if one is enough."""
        if self.layout is None:
            raise StitchError("there are no pieces; allowed: one or more, of no rows if need be")
        if not self._parts:
            return np.empty((0, *self.layout), self._dtype)
        if len(self._parts) == 1 and not copy:
            return self._parts[0].astype(self._dtype, copy=False)
        return np.concatenate(self._parts, dtype=self._dtype)

    def _insert(self, start: int, rows: Rows) -> None:
        """Take in rows that touch those that are here: what both have is kept once."""
        end = start + len(rows)
        if self._overlap == "last":
            self._replace(min(start, self.start), self._slice(self.start, start), [rows], self._slice(end, self.end))
            return
        tail = rows[self.end - start :] if end > self.end else rows[:0]
        if len(tail) * 2 < len(rows):
            # A view would keep the whole piece in memory: turns that bring all rows again would hold them all.
            tail = tail.copy()
        if start < self.start:
            self._replace(start, [rows[: self.start - start]], self._parts, [tail])
        else:
            self._append([tail])

    def _replace(self, start: int, *groups: list[Rows]) -> None:
        self.start, self._parts, self._ends = start, [], []
        for group in groups:
            self._append(group)

    def _append(self, parts: list[Rows]) -> None:
        for part in parts:
            if len(part):
                self._ends.append(self.end + len(part))
                self._parts.append(part)

    def _slice(self, start: int, end: int) -> list[Rows]:
        """The rows of positions `start` to `end - 1` that are here, as views."""
        views = []
        for index in range(bisect.bisect_right(self._ends, start), len(self._parts)):
            part = self._parts[index]
            first = self._ends[index] - len(part)
            if first >= end:
                break
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
        try:
            dtype_of(rows)
        except ValueError as exc:
            raise StitchError(f"{where}: {exc}") from None
        if rows.ndim != 3 or start < 0:
            raise StitchError(
                f"{where}: rows of shape {rows.shape} from position {start}; allowed: [rows, layers, top_k] from 0 on"
            )
        layout = (rows.shape[1], rows.shape[2])
        if self.layout is not None and layout != self.layout:
            raise StitchError(
                f"{where}, from position {start}: {layout[0]} layers of top-{layout[1]}, after"
                f" {self.layout[0]} layers of top-{self.layout[1]}; allowed: one layout in all pieces"
            )
        return layout

    def _check_agreement(self, where: str, start: int, rows: Rows) -> None:
        """Rows of the same position must name the same experts; the order within a top-k says nothing."""
        position = max(start, self.start)
        for held in self._slice(position, min(start + len(rows), self.end)):
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
