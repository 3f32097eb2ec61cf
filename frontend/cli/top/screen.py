"""The screen of `rollbus top` as text, for a terminal of any size."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from ....bus import FleetState
from ....bus.protocol.fleet.presence_table import slots_of
from ....bus.protocol.telemetry.fleet_rates import FleetRates, Rates
from ....schemas.presence import WorkerPresence, WorkerState
from ..fleet_tables import state_cell
from ..tables import NONE, lay_out, printable, wrapped
from .options import TopOptions
from .sections import Section, sections, states_text
from .workers_table import COLUMNS, SPARE_COLUMNS, per_s, percent, seconds, sorted_workers, worker_cells

__all__ = ["Screen", "TopView", "draw", "folded", "heading"]

MIN_WORKERS: Final = 4
"""Minimum number of lines of the table of workers, with its titles. With less room, the lowest table is left out."""
_MODEL: Final = COLUMNS.index("model")
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
    above = [part for line in above for part in folded(line, width)]
    most, left = max(height // 8, 1), height - len(above) - 1
    tables = _fitting([_table(each, width, most) for each in sections(view.state, view.rates, options.model)], left)
    workers = sorted_workers(view.state.workers, view.rates, options.sort, options.model)
    num_keys = len(folded(_keys(options, len(workers), len(workers)), width))
    room = max(height - len(above) - sum(map(len, tables)) - num_keys - 1, 1)
    # The last page ends with the last worker.
    last = _workers_table(view.rates, workers[-room:], width, options)
    end = len(workers) - _num_fitting([*reversed(last[1:])], room)
    options = replace(options, first=max(min(options.first, end), 0))
    head, *blocks = _workers_table(view.rates, workers[options.first : options.first + room], width, options)
    num_shown = _num_fitting(blocks, room)
    keys = folded(_keys(options, num_shown, len(workers)), width)
    below = [*(line for lines in tables for line in lines), *keys]
    size = max(height - len(above) - len(below), 0)
    table = [*head, *(line for block in blocks[: num_shown + 1] for line in block)][:size]
    lines = [*above, *table, *[Text()] * (size - len(table)), *below]
    return Screen(Text("\n").join(lines[:height]), options, num_shown)


def _num_fitting(blocks: Sequence[Sequence[Text]], room: int) -> int:
    """Return how many of the first blocks fit as a whole, at least one if there are any."""
    ends = accumulate(map(len, blocks))
    return min(max(sum(end <= room for end in ends), 1), len(blocks))


def _fitting(tables: list[list[Text]], height: int) -> list[list[Text]]:
    """Return the tables that leave room for workers."""
    while tables and height - sum(map(len, tables)) < MIN_WORKERS:
        tables = tables[:-1]
    return tables


def _table(section: Section, width: int, most: int) -> list[Text]:
    titles = [*section.columns]
    if most < len(section.rows):
        titles[0] += f" ({most} of {len(section.rows):,})"
    table = lay_out(titles, section.rows[:most], width, section.spare)
    lines = [Text(table.head, "reverse"), *(Text(line) for row in table.rows for line in row)]
    return [part for line in lines for part in folded(line, width)]


def folded(line: Text, width: int) -> list[Text]:
    """Return a line in pieces that fit, broken between words, and within a word that is longer than the screen."""
    lines = [Text(part, line.style) for part in wrapped(line.plain, width)]
    if len(lines) == 1:
        lines = [line]
    return [part for each in lines for part in (each.divide(_cuts(each.plain, width)) if len(each) else [each])]


def _cuts(text: str, width: int) -> list[int]:
    """Return the places at which a terminal breaks a line."""
    cuts, used = [], 0
    for number, char in enumerate(text):
        used += cell_len(char)
        if used > width and number:
            cuts.append(number)
            used = cell_len(char)
    return cuts


def _workers_table(
    rates: FleetRates, workers: Sequence[WorkerPresence], width: int, options: TopOptions
) -> list[list[Text]]:
    """Return the lines of the titles, and of each worker."""
    rows = [worker_cells(worker, rates.of(worker.worker)) for worker in workers]
    if options.model is not None or len({worker.model for worker in workers}) < 2:
        # The table below the workers has the model.
        rows = [[NONE if i == _MODEL else cell for i, cell in enumerate(row)] for row in rows]
    table = lay_out(COLUMNS, rows, width, SPARE_COLUMNS)
    blocks = [folded(Text(table.head, "reverse"), width)]
    for worker, lines in zip(workers, table.rows, strict=True):
        texts = [Text(line) for line in lines]
        texts[0].stylize(_STYLES.get(worker.state, "red"), 0, len(state_cell(worker)))
        blocks.append([part for text in texts for part in folded(text, width)])
    return blocks


def _keys(options: TopOptions, num_shown: int, count: int) -> Text:
    where = f"{options.first + 1:,} to {options.first + num_shown:,} of {count:,}" if num_shown else "no workers"
    model = "all" if options.model is None else printable(options.model)
    return Text(f"q quit  s sort: {options.sort}  p model: {model}  up, down, page: {where}", "dim")
