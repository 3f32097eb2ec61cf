"""Rates of a fleet: from what each worker counts to what it did a second lately, and so by model and by fleet."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from ....schemas.presence import WorkerPresence
from ..fleet.presence_table import MAX_WORKERS

__all__ = ["WINDOW_S", "FleetRates", "Rates"]

WINDOW_S: Final = 10.0
"""Seconds that rates cover: ten announcements of a worker."""
STEP_S: Final = 0.5
"""Announcements of a worker that follow faster count as one, and no rate covers less: pings are answered at once. So at
most `WINDOW_S` / `STEP_S` + 3 announcements of each worker are kept."""
MAX_SECONDS: Final = 1e12
"""Announced sums of seconds count as at most this, as any number may be announced: sums of them stay finite."""


class Rates(NamedTuple):
    """What one worker or several did in each second, on the mean of the window.

    Those of several workers are the sums of theirs, so that each mean weighs the workers by what they did.
    """

    tokens_per_s: float = 0.0
    """Tokens that engines made."""
    requests_per_s: float = 0.0
    """Requests that workers offered to their clients; each attempt of each sample is one."""
    first_tokens: float = 0.0
    """Requests that had their first token."""
    first_tokens_s: float = 0.0
    """Seconds from the offers of those to their first tokens, added up."""
    next_tokens: float = 0.0
    """Tokens of all steps but each request's first with tokens."""
    next_tokens_s: float = 0.0
    """Seconds between those steps and the ones before, added up."""
    lookups: float = 0.0
    """Prompt tokens that engines looked up in their prefix caches."""
    hits: float = 0.0
    """Those of them that were there."""

    @property
    def first_token_s(self) -> float | None:
        """Mean seconds from a request's offer to its first token; None: no request had its first token."""
        return self.first_tokens_s / self.first_tokens if self.first_tokens else None

    @property
    def between_tokens_s(self) -> float | None:
        """Mean seconds for each token after the first; None: no request had one."""
        return self.next_tokens_s / self.next_tokens if self.next_tokens else None

    @property
    def prefix_hit(self) -> float | None:
        """Share of the tokens looked up in prefix caches that were there, 0 to 1; None: none were looked up."""
        return min(self.hits / self.lookups, 1.0) if self.lookups else None

    @classmethod
    def sum(cls, rates: Iterable[Self]) -> Self:
        """Return the rates of several workers together."""
        return cls(*map(sum, zip(*rates, strict=True)))


NO_RATES: Final = Rates()


class _WorkerCounts(NamedTuple):
    """What a worker had counted at one time: numbers in the order of the fields of `Rates`."""

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
        """Handle an announcement; one that came no later than the one before is the same."""
        counted = self.counted
        if counted and new.at <= counted[-1].at:
            return
        if counted and any(now < before for now, before in zip(new.counts, counted[-1].counts, strict=True)):
            # Another process counts, or another engine: what was counted before says nothing about its rates.
            counted.clear()
        if len(counted) > 1 and counted[-1].at - counted[-2].at < STEP_S:
            counted.pop()
        counted.append(new)
        # What is left covers a step in any case: the first rates after an outage are those of all that time.
        while new.at - counted[0].at > WINDOW_S and new.at - counted[1].at >= STEP_S:
            counted.popleft()
        first = counted[0]
        seconds = new.at - first.at
        if seconds < STEP_S:
            self.rates = NO_RATES
        else:
            self.rates = Rates(*((now - then) / seconds for now, then in zip(new.counts, first.counts, strict=True)))


class FleetRates:
    """The rates of each worker of a fleet over the last `WINDOW_S` seconds. Time is passed in.

    At most `MAX_WORKERS` workers are followed, as by the `PresenceTable`; the others have no rates.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _FollowedWorker] = {}

    def __repr__(self) -> str:
        """One line with the number of workers."""
        return f"<FleetRates of {len(self._workers)} workers>"

    def update(self, heard: Collection[tuple[WorkerPresence, float]]) -> None:
        """Handle what is known of all live workers: the last announcement of each, and when it came.

        One that was handled before changes nothing, and workers that are not among them are forgotten.
        """
        for worker, at in heard:
            self.observe(worker, at)
        for gone in self._workers.keys() - {worker.worker for worker, _ in heard}:
            self.forget(gone)

    def observe(self, worker: WorkerPresence, now: float) -> None:
        """Handle an announcement of a worker. A new incarnation begins anew, and so does one whose counts fall.

        Args:
            now: when it came, by a clock that never goes back.
        """
        known = self._workers.get(worker.worker)
        if worker.counters is None or (known is None and len(self._workers) >= MAX_WORKERS):
            return
        if known is None or known.incarnation != worker.incarnation or known.model != worker.model:
            known = self._workers[worker.worker] = _FollowedWorker(worker.incarnation, worker.model)
        known.add(_WorkerCounts(now, _counts(worker)))

    def forget(self, worker: str) -> None:
        """Drop a worker that is gone."""
        self._workers.pop(worker, None)

    def of(self, worker: str) -> Rates:
        """Return the rates of a worker: zeros until its second announcement, and for one that is not known."""
        known = self._workers.get(worker)
        return NO_RATES if known is None else known.rates

    def of_models(self) -> dict[str, Rates]:
        """Return the rates of the workers of each model together."""
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
