"""The table of workers in `rollbus top`: its columns, its order, and the columns of a narrow screen."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ....bus.protocol.fleet.presence_table import slots_of
from ....bus.protocol.telemetry.fleet_rates import FleetRates, Rates
from ....schemas.presence import WorkerPresence, WorkerState
from ..byte_counts import staging_text
from ..fleet_tables import NONE, state_cell
from .options import Sort

__all__ = ["COLUMNS", "Column", "chosen_columns", "per_s", "percent", "seconds", "sorted_workers"]

NOTE_WIDTH: Final = 16
"""Minimum width of the last column. If there is less room, other columns are left out."""
GAP: Final = 2
"""Blanks between columns."""


class Column(NamedTuple):
    """One column."""

    title: str
    cell: Callable[[WorkerPresence, Rates], str]
    is_number: bool = True
    rank: int = 0
    """A narrow screen leaves out the columns with the highest rank first. A column with rank 0 always stays."""


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


def _version(worker: WorkerPresence) -> str:
    target = worker.target_version
    is_there = target is None or target == worker.weight_version
    return str(worker.weight_version) if is_there else f"{worker.weight_version} of {target}"


def _kv(worker: WorkerPresence) -> float | None:
    return None if worker.engine_stats is None else worker.engine_stats.kv_cache_use


def _note(worker: WorkerPresence, _: Rates) -> str:
    staging = "" if worker.staging is None else staging_text(worker.staging)
    return "; ".join(filter(None, (staging, worker.last_error)))


COLUMNS: Final = (
    Column("worker", lambda worker, _: worker.worker, is_number=False),
    Column("model", lambda worker, _: worker.model, is_number=False, rank=5),
    Column("state", lambda worker, _: state_cell(worker), is_number=False),
    Column("version", lambda worker, _: _version(worker), rank=1),
    Column("in flight", lambda worker, _: f"{worker.in_flight:,}/{slots_of(worker):,}", rank=2),
    Column("KV", lambda worker, _: percent(_kv(worker)), rank=3),
    Column("tokens/s", lambda _, rates: per_s(rates.tokens_per_s)),
    Column("first", lambda _, rates: seconds(rates.first_token_s), rank=6),
    Column("next", lambda _, rates: seconds(rates.between_tokens_s), rank=7),
    Column("hits", lambda _, rates: percent(rates.prefix_hit), rank=8),
    Column("staging, last error", _note, is_number=False),
)
"""`first` and `next` are the mean times to the first token and between tokens. The last column fills the screen."""

_MODEL: Final = 1
_NOTE: Final = len(COLUMNS) - 1

_KEYS: Final[dict[Sort, Callable[[WorkerPresence, Rates], float]]] = {
    "worker": lambda _worker, _rates: 0.0,
    "state": lambda worker, _: float(worker.state is not WorkerState.SERVING),
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

    With the sort key `state`, equal workers are sorted by state and then by name.
    """
    key = _KEYS[sort]
    shown = [worker for worker in workers if model in (None, worker.model)]
    by_state = sort == "state"
    return sorted(
        shown,
        key=lambda worker: (-key(worker, rates.of(worker.worker)), worker.state if by_state else "", worker.worker),
    )


def chosen_columns(
    rows: Sequence[Sequence[str]], width: int, measure: Callable[[str], int], *, has_models: bool
) -> list[int]:
    """Return the indices of the `COLUMNS` that fit into `width`. The last column is left out if it is empty.

    Args:
        rows: the cells of all columns for each worker on the screen.
        measure: returns the width of a text on a terminal.
        has_models: the workers serve several models.
    """
    wide = [max([len(column.title), *(measure(row[i]) for row in rows)]) for i, column in enumerate(COLUMNS)]
    wide[_NOTE] = NOTE_WIDTH
    left_out = {_MODEL: not has_models, _NOTE: not any(row[_NOTE] for row in rows)}
    chosen = [i for i in range(len(COLUMNS)) if not left_out.get(i)]
    while sum(wide[i] + GAP for i in chosen) - GAP > width:
        dropped = max(chosen, key=lambda i: COLUMNS[i].rank)
        if not COLUMNS[dropped].rank:
            break
        chosen.remove(dropped)
    return chosen
