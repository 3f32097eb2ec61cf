"""The screen of `rollbus top` as text, for a terminal of any size."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ....bus import FleetState
from ....bus.protocol.fleet.presence_table import slots_of
from ....bus.protocol.telemetry.fleet_rates import FleetRates, Rates
from ....schemas.presence import WorkerPresence, WorkerState
from ..console import printable
from .options import TopOptions
from .sections import Section, sections, states_text
from .workers_table import COLUMNS, GAP, chosen_columns, per_s, percent, seconds, sorted_workers

__all__ = ["Screen", "TopView", "draw", "heading"]

MIN_WORKERS: Final = 4
"""Minimum number of lines of the table of workers, with its titles. With less room, the lowest table is left out."""
CELL_WIDTH: Final = 30
"""Minimum width to which a long text is cut before columns are left out."""
_STATE: Final = 2
_STYLES: Final = {
    WorkerState.SERVING: "green",
    WorkerState.STARTING: "yellow",
    WorkerState.UPDATING: "yellow",
    WorkerState.PAUSED: "cyan",
    WorkerState.DRAINED: "cyan",
    WorkerState.ASLEEP: "cyan",
}
"""Colours of states. Other states are red, because their workers do not serve although no command stopped them."""


@dataclass(frozen=True, slots=True)
class TopView:
    """The known state of the fleet."""

    state: FleetState
    rates: FleetRates
    at: float
    """Unix time."""
    problem: str | None = None
    """Reason why the displayed state may be old; None if it is current."""


class Screen(NamedTuple):
    """Content of the screen."""

    text: Text
    options: TopOptions
    """The user's choices, with `first` limited so that the last worker stays visible."""
    rows: int
    """Number of workers that fit on the screen."""


def heading(view: TopView, options: TopOptions, width: int | None = None) -> list[str]:
    """Return the two lines about the fleet, or about one model, with as many figures as fit."""
    workers = [worker for worker in view.state.workers if options.model in (None, worker.model)]
    rates = Rates.sum(view.rates.of(worker.worker) for worker in workers)
    in_flight, room = sum(worker.in_flight for worker in workers), sum(map(slots_of, workers))
    figures = (
        f"{per_s(rates.tokens_per_s)} tokens/s",
        f"in flight {in_flight:,}/{room:,}",
        f"waiting {_waiting(view.state, options.model)}",
        f"first {seconds(rates.first_token_s)}",
        f"next {seconds(rates.between_tokens_s)}",
        f"hits {percent(rates.prefix_hit)}",
        f"{per_s(rates.requests_per_s)} requests/s",
    )
    whose = f"fleet {view.state.fleet}" + (f", model {printable(options.model)}" if options.model else "")
    at = time.strftime("%H:%M:%S", time.localtime(view.at))
    second = ""
    for figure in figures:
        longer = f"{second}  {figure}" if second else figure
        if width is None or cell_len(longer) <= width:
            second = longer
    return [f"{whose} at {at}  {states_text(workers)}", second]


def _waiting(state: FleetState, model: str | None) -> str:
    lanes = [depth.waiting for depth in state.queues if model in (None, depth.model)]
    return f"{sum(lanes):,}" if lanes else "-"


def draw(view: TopView, options: TopOptions, width: int, height: int) -> Screen:
    """Return the screen of a terminal of this size."""
    above = [Text(line, "bold" if not number else "") for number, line in enumerate(heading(view, options, width))]
    if view.problem is not None:
        above.append(Text(printable(view.problem), "bold red"))
    most, left = max(height // 8, 1), height - len(above) - 1
    tables = _fitting([_table(each, width, most) for each in sections(view.state, view.rates, options.model)], left)
    room = max(height - len(above) - sum(map(len, tables)) - 2, 1)
    workers = sorted_workers(view.state.workers, view.rates, options.sort, options.model)
    options = _within(options, len(workers), room)
    shown = workers[options.first : options.first + room]
    has_models = options.model is None and len({worker.model for worker in workers}) > 1
    table = _workers_table(shown, view.rates, width, has_models=has_models)
    blank = [Text()] * (room + 1 - len(table))
    lines = [*above, *table, *blank, *(line for lines in tables for line in lines), _keys(options, shown, len(workers))]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Screen(Text("\n").join(lines[:height]), options, room)


def _within(options: TopOptions, count: int, room: int) -> TopOptions:
    return TopOptions(options.sort, options.model, max(min(options.first, count - room), 0))


def _fitting(tables: list[list[Text]], height: int) -> list[list[Text]]:
    """Return the tables that leave room for workers."""
    while tables and height - sum(map(len, tables)) < MIN_WORKERS:
        tables = tables[:-1]
    return tables


def _table(section: Section, width: int, most: int) -> list[Text]:
    rows = [[printable(cell) for cell in row] for row in section.rows[:most]]
    titles = [*section.columns]
    if len(rows) < len(section.rows):
        titles[0] += f" ({len(rows)} of {len(section.rows):,})"
    widths = [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    shown = [*range(len(titles))]
    for name in section.spare:
        if sum(min(widths[i], CELL_WIDTH) + GAP for i in shown) - GAP > width:
            shown.remove(section.columns.index(name))
    widths = [widths[i] for i in shown]
    _narrow(widths, width)
    lines = [_line([row[i] for i in shown], widths) for row in (titles, *rows)]
    lines[0].stylize("reverse")
    return lines


def _narrow(widths: list[int], width: int) -> None:
    """Narrow the widest columns, such as names of models and paths, until all columns fit."""
    while sum(widths) + GAP * (len(widths) - 1) > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1


def _line(cells: Sequence[str], widths: Sequence[int]) -> Text:
    return Text((" " * GAP).join(_cut(cell, wide) for cell, wide in zip(cells, widths, strict=True)))


def _cut(cell: str, width: int, *, is_number: bool = False) -> str:
    """Return a cell of exactly this width."""
    length = cell_len(cell)
    if length > width:
        return set_cell_size(cell, width - 1) + "…"
    return " " * (width - length) + cell if is_number else cell + " " * (width - length)


def _workers_table(workers: Sequence[WorkerPresence], rates: FleetRates, width: int, *, has_models: bool) -> list[Text]:
    rows = [[printable(column.cell(worker, rates.of(worker.worker))) for column in COLUMNS] for worker in workers]
    chosen = chosen_columns(rows, width, cell_len, has_models=has_models)
    titles = [column.title for column in COLUMNS]
    widths = {i: max(cell_len(row[i]) for row in (titles, *rows)) for i in chosen}
    left = width - sum(widths[i] + GAP for i in chosen[:-1])
    widths[chosen[-1]] = max(min(widths[chosen[-1]], left), 1)
    lines = [Text(style="reverse"), *(Text() for _ in rows)]
    for row, line, worker in zip((titles, *rows), lines, (None, *workers), strict=True):
        for number, i in enumerate(chosen):
            style = _STYLES.get(worker.state, "red") if worker is not None and i == _STATE else ""
            line.append(" " * GAP * bool(number) + _cut(row[i], widths[i], is_number=COLUMNS[i].is_number), style)
    return lines


def _keys(options: TopOptions, shown: Sequence[WorkerPresence], count: int) -> Text:
    where = f"{options.first + 1:,} to {options.first + len(shown):,} of {count:,}" if shown else "no workers"
    model = "all" if options.model is None else printable(options.model)
    return Text(f"q quit  s sort: {options.sort}  p model: {model}  up, down, page: {where}", "dim")
