"""The table of workers in `rollbus top`: its columns and its order."""

from collections.abc import Callable, Sequence
from typing import Final

from ....bus.protocol.telemetry.fleet_rates import FleetRates, Rates
from ....schemas.presence import WorkerPresence
from ..fleet_tables import in_flight_cell, note_cell, severity, state_cell, version_cell
from ..tables import NONE
from .options import Sort

__all__ = ["COLUMNS", "SPARE_COLUMNS", "per_s", "percent", "seconds", "sorted_workers", "worker_cells"]


def per_s(rate: float) -> str:
    """Return a rate of tokens or requests as text. Rates below 100 have one decimal place."""
    return f"{rate:,.0f}" if rate >= 100 or not rate else f"{rate:.1f}"


def seconds(mean: float | None) -> str:
    """Return a mean time as text with about three digits."""
    if mean is None:
        return NONE
    if mean >= 10:
        return f"{mean:,.0f} s"
    return f"{mean:.1f} s" if mean >= 1 else f"{1000 * mean:.{0 if mean >= 0.01 else 1}f} ms"


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return NONE if share is None else f"{100 * share:.0f} %"


def _kv(worker: WorkerPresence) -> float | None:
    return None if worker.engine_stats is None else worker.engine_stats.kv_cache_use


COLUMNS: Final = (
    *("state", "worker", "model", "version", "in flight", "KV", "tokens/s"),
    *("first", "next", "hits", "note"),
)
"""`first` and `next` are the mean times to the first token and between tokens."""
SPARE_COLUMNS: Final = ("hits", "next", "first", "model", "KV", "in flight", "version")
"""Columns that a narrow screen leaves out, in this order."""


def worker_cells(worker: WorkerPresence, rates: Rates) -> list[str]:
    """Return the cells of `COLUMNS` for one worker."""
    return [
        state_cell(worker),
        worker.worker,
        worker.model,
        version_cell(worker),
        in_flight_cell(worker),
        percent(_kv(worker)),
        per_s(rates.tokens_per_s),
        seconds(rates.first_token_s),
        seconds(rates.between_tokens_s),
        percent(rates.prefix_hit),
        note_cell(worker),
    ]


_KEYS: Final[dict[Sort, Callable[[WorkerPresence, Rates], float]]] = {
    "worker": lambda _worker, _rates: 0.0,
    "in-flight": lambda worker, _: worker.in_flight,
    "kv": lambda worker, _: _or_last(_kv(worker)),
    "tokens": lambda _, rates: rates.tokens_per_s,
    "first-token": lambda _, rates: _or_last(rates.first_token_s),
    "next-token": lambda _, rates: _or_last(rates.between_tokens_s),
    "hits": lambda _, rates: _or_last(rates.prefix_hit),
}


def _or_last(value: float | None) -> float:
    return -1.0 if value is None else value


def sorted_workers(
    workers: Sequence[WorkerPresence], rates: FleetRates, sort: Sort, model: str | None
) -> list[WorkerPresence]:
    """Return the workers of one model, or of all models, highest value first. Equal workers are sorted by name.

    With the sort key `state`, the worst state comes first.
    """
    shown = [worker for worker in workers if model in (None, worker.model)]
    if sort == "state":
        return sorted(shown, key=severity)
    key = _KEYS[sort]
    return sorted(shown, key=lambda worker: (-key(worker, rates.of(worker.worker)), worker.worker))
