"""Computes the recent rates of each worker from its counters, and the sums by model and fleet."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from ....schemas.presence import WorkerPresence
from ..fleet.presence_table import MAX_WORKERS

__all__ = ["WINDOW_S", "FleetRates", "Rates"]

WINDOW_S: Final = 10.0
"""Seconds that rates cover: ten presence messages of a worker."""
RATE_STEP_S: Final = 0.5
"""Faster presence messages of a worker count as one, and no rate covers less time: workers answer pings immediately. So
at most `WINDOW_S` / `RATE_STEP_S` + 3 presence messages of each worker are kept."""
MAX_SECONDS: Final = 1e12
"""The maximum of a sum of seconds that a worker publishes, so that sums over workers stay finite."""


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

    At most `MAX_WORKERS` workers are followed, as in the `PresenceTable`. Other workers have no rates.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _FollowedWorker] = {}

    def __repr__(self) -> str:
        """Return one line with the number of workers."""
        return f"<FleetRates of {len(self._workers)} workers>"

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
        if worker.counters is None or (known is None and len(self._workers) >= MAX_WORKERS):
            return
        if known is None or known.incarnation != worker.incarnation or known.model != worker.model:
            known = self._workers[worker.worker] = _FollowedWorker(worker.incarnation, worker.model)
        known.add(_WorkerCounts(now, _counts(worker)))

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


def _counts(worker: WorkerPresence) -> tuple[float, ...]:
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
