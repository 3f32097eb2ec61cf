"""The last hour of a fleet: one point every five seconds for the fleet, each model and each worker."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["FIELDS", "MAX_MODELS", "MAX_SERIES", "NUM_POINTS", "SERIES_BYTES", "STEP_S", "History", "Point", "Series"]

STEP_S: Final = 5
"""Seconds between points."""
NUM_POINTS: Final = 720
"""The number of points in an hour."""
MAX_SERIES: Final = 2000
"""Workers with points. Further workers have none, but count in the fleet and in their model."""
MAX_MODELS: Final = 64
"""Models with points. Further models have none, but count in the fleet."""


class Point(NamedTuple):
    """The values of one worker, a model or the fleet at one time. NaN means not known."""

    tokens_per_s: float
    """Tokens per second that engines generated, over the last ten seconds."""
    first_token_s: float
    """Mean seconds from the offer of a request to its first token, over the same time."""
    between_tokens_s: float
    """Mean seconds for each token after the first, over the same time."""
    queue_wait_s: float
    """Mean seconds from the publication of a request to a worker's offer. Only requests of the program that keeps this
    history are known, not those of other clients. Workers have no value."""
    waiting: float
    """Requests that no engine has started: those at workers and, for models and the fleet, also those in the queue."""
    in_flight: float
    """Requests that workers have admitted and that have not ended."""


FIELDS: Final = Point._fields
SERIES_BYTES: Final = len(FIELDS) * NUM_POINTS * 4
"""Bytes of one worker, model or fleet: 17 KB. All series together have at most 36 MB."""
Series: TypeAlias = dict[str, list[float | None]]
"""By field: the points from the oldest to the newest; None: not known."""

Ring: TypeAlias = npt.NDArray[np.float32]
"""By field and by point number modulo `NUM_POINTS`."""


class _Rings:
    """Series by name, all with the same point numbers."""

    def __init__(self, max_series: int) -> None:
        self._max_series = max_series
        self._rings: dict[str, Ring] = {}
        # By name: the number of the last point with a value.
        self._seen: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    @property
    def names(self) -> Iterable[str]:
        return self._rings.keys()

    def ring(self, name: str) -> Ring | None:
        return self._rings.get(name)

    def clear(self, places: npt.NDArray[np.int64]) -> None:
        """Clear the array places of new points, which have values of an hour ago."""
        for ring in self._rings.values():
            ring[:, places] = np.nan

    def add(self, number: int, points: Mapping[str, Point]) -> None:
        for name in [name for name, seen in self._seen.items() if number - seen >= NUM_POINTS and name not in points]:
            del self._rings[name], self._seen[name]
        for name, point in points.items():
            ring = self._rings.get(name)
            if ring is None:
                if len(self._rings) >= self._max_series:
                    continue
                ring = self._rings[name] = np.full((len(FIELDS), NUM_POINTS), np.nan, np.float32)
            ring[:, number % NUM_POINTS] = point
            self._seen[name] = number


class History:
    """The last hour. The caller passes in the time as the number of a step of `STEP_S` seconds.

    Attributes:
        number: number of the last point; 0: there is none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._fleet, self._models, self._workers = _Rings(1), _Rings(MAX_MODELS), _Rings(MAX_SERIES)

    def __repr__(self) -> str:
        """Return one line with the number of the last point and the bytes of all points."""
        return f"<History number={self.number} bytes={self.num_bytes}>"

    @property
    def num_bytes(self) -> int:
        """The bytes of all points."""
        return sum(rings.num_bytes for rings in (self._fleet, self._models, self._workers))

    def add(self, number: int, fleet: Point, models: Mapping[str, Point], workers: Mapping[str, Point]) -> None:
        """Add one point of each series. Steps between the last point and this one have no known values.

        A worker or model without a point for an hour is removed.

        Args:
            number: number of the step. If it is not above `self.number`, nothing is added.
        """
        if number <= self.number:
            return
        first = max(self.number + 1, number - NUM_POINTS + 1)
        places = np.arange(first, number + 1) % NUM_POINTS
        for rings, points in ((self._fleet, {"": fleet}), (self._models, models), (self._workers, workers)):
            rings.clear(places)
            rings.add(number, points)
        self.number = number

    def fleet(self, since: int = 0) -> Series:
        """Return the points of the fleet after number `since`, of the last hour."""
        return self._series(self._fleet.ring(""), since)

    def models(self, since: int = 0) -> dict[str, Series]:
        """Return the points of each model after number `since`, by name."""
        return {name: self._series(self._models.ring(name), since) for name in sorted(self._models.names)}

    def worker(self, name: str, since: int = 0) -> Series | None:
        """Return the points of a worker after number `since`; None: it has none."""
        ring = self._workers.ring(name)
        return None if ring is None else self._series(ring, since)

    def _series(self, ring: Ring | None, since: int) -> Series:
        # A number above the last one comes from an earlier run of the program.
        first = max(since + 1 if since <= self.number else 1, self.number - NUM_POINTS + 1, 1)
        if ring is None:
            return {field: [] for field in FIELDS}
        points = ring[:, np.arange(first, self.number + 1) % NUM_POINTS]
        return {field: _values(row) for field, row in zip(FIELDS, points, strict=True)}


def _values(row: Ring) -> list[float | None]:
    # float32 has only seven digits. Four decimals are a tenth of a millisecond.
    return [value if value == value else None for value in np.round(row.astype(np.float64), 4).tolist()]  # noqa: PLR0124
