"""The recent rates of each worker, from its counters, with the sums by model and fleet, and their points of an hour."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ....schemas.presence import WorkerPresence

WINDOW_S: Final = 10.0
"""Seconds that rates cover: ten presence messages of a worker."""
RATE_STEP_S: Final = 0.5
"""Faster presence messages of a worker count as one, and no rate covers less time: workers answer pings immediately. So
at most `WINDOW_S` / `RATE_STEP_S` + 3 presence messages of each worker are kept."""
MAX_SECONDS: Final = 1e12
"""The maximum of a sum of seconds that a worker publishes, so that sums over workers stay finite."""
STEP_S: Final = 5
"""Seconds between points."""
NUM_POINTS: Final = 720
"""The number of points in an hour."""
MAX_SERIES: Final = 2000
"""Workers with points. Further workers have none, but count in the fleet and in their model."""
MAX_MODELS: Final = 64
"""Models with points. Further models have none, but count in the fleet."""
Series: TypeAlias = dict[str, list[float | None]]
"""By field: the points from the oldest to the newest; None: not known."""
Ring: TypeAlias = npt.NDArray[np.float32]
"""By field and by point number modulo `NUM_POINTS`."""


class Rates(NamedTuple):
    """The mean rates per second of one or several workers over the window.

    The rates of several workers are the sums of their rates, so each mean weighs the workers by their work.
    """

    tokens_per_s: float = 0.0
    """Tokens that engines generated."""
    requests_per_s: float = 0.0
    """Requests that workers offered to their clients. Each attempt of each sample counts."""
    first_tokens: float = 0.0
    """Requests that got their first token."""
    first_tokens_s: float = 0.0
    """The sum of the seconds from their offers to their first tokens."""
    next_tokens: float = 0.0
    """Tokens of all steps, without each request's first step with tokens."""
    next_tokens_s: float = 0.0
    """The sum of the seconds between each of these steps and the previous one."""
    lookups: float = 0.0
    """Prompt tokens that engines looked up in their prefix caches."""
    hits: float = 0.0
    """Prompt tokens that engines found in their prefix caches."""

    @property
    def first_token_s(self) -> float | None:
        """Mean seconds from a request's offer to its first token. None: no request had its first token."""
        return self.first_tokens_s / self.first_tokens if self.first_tokens else None

    @property
    def between_tokens_s(self) -> float | None:
        """Mean seconds for each token after the first token. None: no request had a second token."""
        return self.next_tokens_s / self.next_tokens if self.next_tokens else None

    @property
    def prefix_hit(self) -> float | None:
        """Share of looked-up tokens that were in prefix caches, 0 to 1. None: there were no lookups."""
        return min(self.hits / self.lookups, 1.0) if self.lookups else None

    @classmethod
    def sum(cls, rates: Iterable[Self]) -> Self:
        """Return the sum of the rates of several workers."""
        return cls(*map(sum, zip(*rates, strict=True)))


NO_RATES: Final = Rates()


class _WorkerCounts(NamedTuple):
    """The counters of a worker at one time, in the order of the fields of `Rates`."""

    at: float
    counts: tuple[float, ...]


@dataclass(slots=True)
class _FollowedWorker:
    """One incarnation of a worker."""

    incarnation: str
    model: str
    counted: deque[_WorkerCounts] = field(default_factory=deque)
    rates: Rates = NO_RATES

    def add(self, new: _WorkerCounts) -> None:
        """Handle presence. A message that is not newer than the previous one is the same message."""
        counted = self.counted
        if counted and new.at <= counted[-1].at:
            return
        if counted and any(now < before for now, before in zip(new.counts, counted[-1].counts, strict=True)):
            # Another process or engine counts now, so the earlier counts are useless for its rates.
            counted.clear()
        if len(counted) > 1 and counted[-1].at - counted[-2].at < RATE_STEP_S:
            counted.pop()
        counted.append(new)
        # The remaining counts always cover a step: the first rates after an outage cover the whole outage.
        while new.at - counted[0].at > WINDOW_S and new.at - counted[1].at >= RATE_STEP_S:
            counted.popleft()
        first = counted[0]
        seconds = new.at - first.at
        if seconds < RATE_STEP_S:
            self.rates = NO_RATES
        else:
            self.rates = Rates(*((now - then) / seconds for now, then in zip(new.counts, first.counts, strict=True)))


class FleetRates:
    """The rates of each worker of a fleet over the last `WINDOW_S` seconds. The caller passes in the time.

    The `PresenceTable` limits the number of workers.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _FollowedWorker] = {}

    def update(self, heard: Collection[tuple[WorkerPresence, float]]) -> None:
        """Handle the last presence of all live workers, each with the time of its arrival.

        Presence that was handled before changes nothing. Workers that are not in `heard` are removed.
        """
        for worker, at in heard:
            self.observe(worker, at)
        for gone in self._workers.keys() - {worker.worker for worker, _ in heard}:
            self.forget(gone)

    def observe(self, worker: WorkerPresence, now: float) -> None:
        """Handle presence of a worker. The rates restart with a new incarnation and with lower counts.

        Args:
            now: the time of arrival, by a clock that never goes back.
        """
        known = self._workers.get(worker.worker)
        if worker.counters is None:
            return
        if known is None or known.incarnation != worker.incarnation or known.model != worker.model:
            known = self._workers[worker.worker] = _FollowedWorker(worker.incarnation, worker.model)
        known.add(_WorkerCounts(now, _read_counts(worker)))

    def forget(self, worker: str) -> None:
        """Remove a lost worker."""
        self._workers.pop(worker, None)

    def of(self, worker: str) -> Rates:
        """Return the rates of a worker: zeros until its second presence message, and for an unknown worker."""
        known = self._workers.get(worker)
        return NO_RATES if known is None else known.rates

    def of_models(self) -> dict[str, Rates]:
        """Return the rates of each model's workers together."""
        models: dict[str, list[Rates]] = {}
        for known in self._workers.values():
            models.setdefault(known.model, []).append(known.rates)
        return {model: Rates.sum(rates) for model, rates in models.items()}

    def of_fleet(self) -> Rates:
        """Return the rates of all workers together."""
        return Rates.sum(known.rates for known in self._workers.values())


def _read_counts(worker: WorkerPresence) -> tuple[float, ...]:
    counters, stats = worker.counters, worker.engine_stats
    if counters is None:
        return ()
    return (
        counters.generated_tokens,
        counters.requests,
        counters.first_tokens,
        min(counters.first_tokens_s, MAX_SECONDS),
        counters.next_tokens,
        min(counters.next_tokens_s, MAX_SECONDS),
        0 if stats is None else stats.prefix_cache_queries or 0,
        0 if stats is None else stats.prefix_cache_hits or 0,
    )


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


class _Rings:
    """Series by name, all with the same point numbers."""

    def __init__(self, max_series: int) -> None:
        self._max_series = max_series
        self.rings: dict[str, Ring] = {}
        # By name: the number of the last point with a value.
        self._seen: dict[str, int] = {}

    def clear(self, places: npt.NDArray[np.int64]) -> None:
        """Clear the array places of new points, which have values of an hour ago."""
        for ring in self.rings.values():
            ring[:, places] = np.nan

    def add(self, number: int, points: Mapping[str, Point]) -> None:
        for name in [name for name, seen in self._seen.items() if number - seen >= NUM_POINTS and name not in points]:
            del self.rings[name], self._seen[name]
        for name, point in points.items():
            ring = self.rings.get(name)
            if ring is None:
                if len(self.rings) >= self._max_series:
                    continue
                ring = self.rings[name] = np.full((len(FIELDS), NUM_POINTS), np.nan, np.float32)
            ring[:, number % NUM_POINTS] = point
            self._seen[name] = number


class History:
    """The last hour. The caller passes in the time as the number of a step of `STEP_S` seconds.

    There is one point every five seconds for the fleet, each model and each worker.

    Attributes:
        number: number of the last point; 0: there is none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._fleet, self._models, self._workers = _Rings(1), _Rings(MAX_MODELS), _Rings(MAX_SERIES)

    @property
    def num_bytes(self) -> int:
        """The bytes of all points."""
        everything = (self._fleet, self._models, self._workers)
        return sum(ring.nbytes for each in everything for ring in each.rings.values())

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
        return self._read_series(self._fleet.rings.get(""), since)

    def models(self, since: int = 0) -> dict[str, Series]:
        """Return the points of each model after number `since`, by name."""
        return {name: self._read_series(ring, since) for name, ring in sorted(self._models.rings.items())}

    def worker(self, name: str, since: int = 0) -> Series | None:
        """Return the points of a worker after number `since`; None: it has none."""
        ring = self._workers.rings.get(name)
        return None if ring is None else self._read_series(ring, since)

    def _read_series(self, ring: Ring | None, since: int) -> Series:
        # A number above the last one comes from an earlier run of the program.
        first = max(since + 1 if since <= self.number else 1, self.number - NUM_POINTS + 1, 1)
        if ring is None:
            return {field: [] for field in FIELDS}
        points = ring[:, np.arange(first, self.number + 1) % NUM_POINTS]
        return {field: _read_values(row) for field, row in zip(FIELDS, points, strict=True)}


def _read_values(row: Ring) -> list[float | None]:
    # float32 has only seven digits. Four decimals are a tenth of a millisecond.
    return [value if value == value else None for value in np.round(row.astype(np.float64), 4).tolist()]  # noqa: PLR0124
