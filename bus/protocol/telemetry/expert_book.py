"""Counts how often a worker's router chose each expert, by intervals of 5 s and by weight version, without I/O.

One engine step has few rows, so the book counts some hundreds of rows together. Pending rows are bounded, and are
counted before each answer. The caller passes in the time, which never goes back. The wall clock numbers the intervals,
so that a number has the same meaning for all workers of a fleet.
"""

import math
from collections import OrderedDict, deque
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.limits import MAX_EXPERT_CELLS, MAX_EXPERT_VERSIONS
from ....schemas.presence import RoutedExpertsInfo
from ....schemas.rows import DTYPES, Rows
from ....schemas.telemetry import ExpertCounts, ExpertLoad, TokenTally
from .expert_window import encode_counts

__all__ = ["INTERVAL_S", "KEPT_INTERVALS", "ExpertBook", "Plane", "Window", "is_countable"]

INTERVAL_S: Final = 5.0
KEPT_INTERVALS: Final = 24
"""Number of kept intervals, which cover two minutes: a reader that asks for the last minute may be late."""
MAX_PENDING_ROWS: Final = 512
"""Maximum number of rows that wait to be counted. Counting them takes a third of a millisecond. Larger batches are not
faster per row."""

Plane = Literal["prompt", "generated"]
Window = Literal["recent", "versions"]


class _CountedPositions:
    """The positions of one plane, under one weight version."""

    __slots__ = ("computed", "counts", "seen")

    def __init__(self, cells: int) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(cells, np.int64)
        self.computed = 0
        self.seen = 0

    def add(self, other: "_CountedPositions") -> None:
        self.counts += other.counts
        self.computed += other.computed
        self.seen += other.seen

    @property
    def tally(self) -> TokenTally:
        return TokenTally(computed=self.computed, seen=self.seen)


class _Planes(NamedTuple):
    prompt: _CountedPositions
    generated: _CountedPositions


_ByVersion = OrderedDict[int, _Planes]
"""By weight version. The version that was used last is at the end."""


def is_countable(routing: RoutedExpertsInfo) -> bool:
    """Return True if the model has no more experts than a reader accepts."""
    return routing.num_layers * routing.num_experts <= MAX_EXPERT_CELLS


class ExpertBook:
    """The counts of one incarnation of a worker.

    Memory: the planes of `KEPT_INTERVALS` intervals and of `MAX_EXPERT_VERSIONS` versions. For 61 layers of 384 experts
    a plane takes 187 KB.

    Args:
        routing: routed experts of the engine's model; `is_countable` must be True for it.
        now: present time in seconds.
        unix_now: the same moment as Unix time.
    """

    def __init__(self, routing: RoutedExpertsInfo, now: float, unix_now: float) -> None:
        self._routing = routing
        self._cells = routing.num_layers * routing.num_experts
        # Index of the first counter of each choice's layer. The type is narrow, because most of the time is needed to
        # add and read these values.
        firsts = np.repeat(np.arange(routing.num_layers) * routing.num_experts, routing.top_k)
        self._firsts = firsts.astype(np.min_scalar_type(self._cells - 1))
        # Added to the given time, so that steps of the wall clock have no effect.
        self._unix_offset = unix_now - now
        self._began_at = unix_now
        self._first_token_at: float | None = None
        self._first = int(unix_now / INTERVAL_S)
        # The last interval that has ended, and the intervals with tokens.
        self._number = self._first - 1
        self._intervals: deque[tuple[int, _ByVersion]] = deque()
        self._totals: _ByVersion = OrderedDict()
        self._open: _ByVersion = OrderedDict()
        self._version = 0
        self._pending: dict[Plane, list[Rows]] = {"prompt": [], "generated": []}
        self._num_pending = 0
        # Cached answers by first interval and window. They are valid for the present interval.
        self._answers: dict[tuple[int, Window], ExpertLoad] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<ExpertBook number={self._number} kept={len(self._intervals)} versions={list(self._totals)}>"

    def add_computed(self, plane: Plane, count: int, weight_version: int, now: float) -> None:
        """Add positions that the engine computed, with or without rows."""
        getattr(self._planes(weight_version, now), plane).computed += count

    def add_rows(self, plane: Plane, rows: Rows, weight_version: int, now: float) -> None:
        """Add the rows of computed positions. The caller must not change them later. Rows of another shape are ignored.

        A row with an expert that the model does not have is not counted.
        """
        routing = self._routing
        if rows.shape[1:] != (routing.num_layers, routing.top_k) or rows.dtype != DTYPES[routing.dtype]:
            return
        self._planes(weight_version, now)
        for first in range(0, len(rows), MAX_PENDING_ROWS):
            part = rows[first : first + MAX_PENDING_ROWS]
            self._pending[plane].append(part)
            self._num_pending += len(part)
            if self._num_pending >= MAX_PENDING_ROWS:
                self._count_pending()

    def _planes(self, weight_version: int, now: float) -> _Planes:
        """Return the planes of this version in the present interval."""
        self._end_intervals(now)
        if weight_version != self._version:
            self._count_pending()
            self._version = weight_version
        if self._first_token_at is None:
            self._first_token_at = now + self._unix_offset
        return self._planes_in(self._open, weight_version)

    def _planes_in(self, versions: _ByVersion, weight_version: int) -> _Planes:
        planes = versions.get(weight_version)
        if planes is None:
            planes = versions[weight_version] = _Planes(_CountedPositions(self._cells), _CountedPositions(self._cells))
            if len(versions) > MAX_EXPERT_VERSIONS:
                versions.popitem(last=False)
        elif next(reversed(versions)) != weight_version:
            versions.move_to_end(weight_version)
        return planes

    def _count_pending(self) -> None:
        """Count the pending rows, which belong to `_version` and the open interval."""
        if not self._num_pending:
            return
        planes = self._planes_in(self._open, self._version)
        pending, self._pending = self._pending, {"prompt": [], "generated": []}
        self._num_pending = 0
        for plane, parts in pending.items():
            if parts:
                self._count(getattr(planes, plane), parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _count(self, counted: _CountedPositions, rows: Rows) -> None:
        num_experts = self._routing.num_experts
        if num_experts <= np.iinfo(rows.dtype).max and len(rows) and int(rows.max()) >= num_experts:
            rows = rows[(rows < num_experts).all(axis=(1, 2))]
        cells = np.add(rows.reshape(len(rows), self._firsts.size), self._firsts, dtype=self._firsts.dtype)
        counted.counts += np.bincount(cells.ravel(), minlength=self._cells)
        counted.seen += len(rows)

    def _end_intervals(self, now: float) -> None:
        number = int((now + self._unix_offset) / INTERVAL_S) - 1
        if number <= self._number:
            return
        self._count_pending()
        if self._open:
            for version, planes in self._open.items():
                total = self._planes_in(self._totals, version)
                total.prompt.add(planes.prompt)
                total.generated.add(planes.generated)
            self._intervals.append((self._number + 1, self._open))
            self._open = OrderedDict()
        self._number = number
        while self._intervals and self._intervals[0][0] <= number - KEPT_INTERVALS:
            self._intervals.popleft()
        self._answers.clear()

    def load(self, since: int, window: Window, now: float) -> ExpertLoad:
        """Return the counts until the end of the last interval. The answer is cached for each interval.

        Args:
            since: for the window `recent`: the interval before the first one to return.
        """
        self._end_intervals(now)
        first = self._first
        if window == "recent":
            first = max(first, since + 1, self._number - KEPT_INTERVALS + 1)
        first = min(first, self._number + 1)
        answer = self._answers.get((first, window))
        if answer is None:
            answer = self._answers[first, window] = self._answer(first, window)
        return answer

    def _answer(self, first: int, window: Window) -> ExpertLoad:
        routing = self._routing
        if window == "recent":
            versions, began_at = self._sum(first), max(first * INTERVAL_S, self._began_at)
        else:
            versions, began_at = self._totals, self._first_token_at or math.inf
        return ExpertLoad(
            number=self._number,
            first=first,
            seconds=round(max((self._number + 1) * INTERVAL_S - began_at, 0.0), 3),
            num_layers=routing.num_layers,
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            counts=tuple(
                ExpertCounts(
                    weight_version=version,
                    prompt=encode_counts(planes.prompt.counts),
                    generated=encode_counts(planes.generated.counts),
                    prompt_tokens=planes.prompt.tally,
                    generated_tokens=planes.generated.tally,
                )
                for version, planes in reversed(versions.items())
                if any(plane.computed or plane.seen for plane in planes)
            ),
        )

    def _sum(self, first: int) -> _ByVersion:
        """Return the sum of the intervals from `first` on."""
        versions: _ByVersion = OrderedDict()
        for number, interval in self._intervals:
            if number >= first:
                for version, planes in interval.items():
                    total = self._planes_in(versions, version)
                    total.prompt.add(planes.prompt)
                    total.generated.add(planes.generated)
        return versions
