"""The screen of `rollbus top` as text, for a terminal of any size, and the keys that change it.

This module reads no terminal.
"""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ....bus import FleetState
from ....bus.protocol.fleet.desired import why_behind
from ....bus.protocol.fleet.presence import by_model, slots_of
from ....bus.protocol.telemetry.rates import FleetRates, Rates
from ....schemas import control
from ....schemas.checks import list_names
from ....schemas.decoding import JsonObject
from ....schemas.presence import WorkerPresence, WorkerState
from ..commands.views import SORTS, Sort
from ..console import write
from ..tables import NONE, lay_out, print_table, printable
from . import status

Key = Literal["quit", "sort", "model", "up", "down", "page_up", "page_down", "home", "end", "open", "back"]
_BYTES_OF: Final[dict[Key, tuple[bytes, ...]]] = {
    "quit": (b"q", b"Q"),
    "sort": (b"s",),
    "model": (b"p",),
    "up": (b"k", b"\x1b[A", b"\x1bOA"),
    "down": (b"j", b"\x1b[B", b"\x1bOB"),
    "page_up": (b"\x1b[5~",),
    "page_down": (b" ", b"\x1b[6~"),
    "home": (b"\x1b[H", b"\x1bOH", b"\x1b[1~"),
    "end": (b"\x1b[F", b"\x1bOF", b"\x1b[4~"),
    "open": (b"\r", b"\n"),
    "back": (b"b", b"\x7f", b"\x1b[D", b"\x1bOD"),
}
"""Bytes that terminals send, as xterm defines them, with and without application mode."""
KEY_OF: Final = {each: key for key, sequences in _BYTES_OF.items() for each in sequences}
"""The key of each of these sequences."""
_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,8}[@-~]|O[@-~])|[^\x1b]|\x1b(?![\[O])", re.DOTALL)
_PREFIX: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,8}|O)?\Z")


@dataclass(frozen=True, slots=True)
class TopOptions:
    """The displayed part of the fleet."""

    sort: Sort = "state"
    model: str | None = None
    """None for workers of all models."""


class KeyReader:
    """Decodes keys from the bytes of a terminal, in pieces of any length. It discards unknown bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> list[Key]:
        """Return the keys that are complete with `data`."""
        data = self._rest + data
        partial = _PREFIX.search(data)
        # The length of a prefix is bounded, so little is buffered.
        self._rest = partial[0] if partial else b""
        found = _SEQUENCE.findall(data[: len(data) - len(self._rest)])
        return [KEY_OF[sequence] for sequence in found if sequence in KEY_OF]


def choose(options: TopOptions, key: Key, models: Sequence[str]) -> TopOptions | None:
    """Return the choices after a key; None if the key changes none.

    Args:
        models: models of the fleet, in the order in which the key `p` selects them.
    """
    if key == "sort":
        return dataclasses.replace(options, sort=SORTS[(SORTS.index(options.sort) + 1) % len(SORTS)])
    if key != "model":
        return None
    choices = [None, *models]
    number = choices.index(options.model) if options.model in choices else 0
    return dataclasses.replace(options, model=choices[(number + 1) % len(choices)])


_BEYOND: Final = 1_000_000
"""More lines than a text has. The screen stops at the last line."""


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
        status.state_cell(worker),
        worker.worker,
        worker.model,
        status.version_cell(worker),
        status.in_flight_cell(worker),
        percent(_kv(worker)),
        per_s(rates.tokens_per_s),
        seconds(rates.first_token_s),
        seconds(rates.between_tokens_s),
        percent(rates.prefix_hit),
        status.note_cell(worker),
    ]


_SORT_KEYS: Final[dict[Sort, Callable[[WorkerPresence, Rates], float]]] = {
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


def sorted_workers(workers: Sequence[WorkerPresence], rates: FleetRates, sort: Sort) -> list[WorkerPresence]:
    """Return the workers, highest value first. Equal workers are sorted by name.

    With the sort key `state`, the worst state comes first.
    """
    if sort == "state":
        return sorted(workers, key=status.severity)
    key = _SORT_KEYS[sort]
    return sorted(workers, key=lambda worker: (-key(worker, rates.of(worker.worker)), worker.worker))


MODEL_COLUMNS: Final = ("model", "workers", "tokens/s", "epoch", "version", "weights from", "state", "LoRAs", "behind")
MODEL_SPARE_COLUMNS: Final = ("weights from", "LoRAs", "tokens/s")
COMMAND_COLUMNS: Final = ("command", "of", "epoch", "for", "done")
MAX_COMMANDS: Final = 5
"""Limit on commands of each model: the latest of those that are still in the desired state."""
MAX_BEHIND: Final = 3
"""Limit on workers behind the desired state that are named with the reason. The others are counted."""


class Section(NamedTuple):
    """One table."""

    columns: Sequence[str]
    rows: list[list[str]]
    spare: Sequence[str] = ()
    """Columns that a narrow screen leaves out, in this order."""


def sections(state: FleetState, rates: FleetRates) -> list[Section]:
    """Return the tables that are not empty."""
    every = (
        Section(status.PROBLEM_COLUMNS, status.problem_rows(state.queue_problems)),
        Section(status.QUEUE_COLUMNS, status.queue_rows(state.queues)),
        Section(MODEL_COLUMNS, model_rows(state, rates), MODEL_SPARE_COLUMNS),
        Section(COMMAND_COLUMNS, command_rows(state)),
    )
    return [section for section in every if section.rows]


def model_rows(state: FleetState, rates: FleetRates) -> list[list[str]]:
    """Return the rows of the models: totals of their workers, desired states, and workers that are behind."""
    of_models = rates.of_models()
    rows = []
    for name, workers in sorted(by_model(state.workers, state.desired).items()):
        desired = state.desired.get(name)
        rows.append(
            [
                name,
                f"{len(workers):,}",
                per_s(of_models[name].tokens_per_s) if name in of_models else NONE,
                NONE if desired is None else str(desired.epoch),
                *status.told_cells({} if desired is None else desired.registers),
                _behind(workers, desired or control.DesiredState(model=name)),
            ]
        )
    return rows


def _behind(workers: Sequence[WorkerPresence], desired: control.DesiredState) -> str:
    behind = [f"{worker.worker} {why}" for worker in workers if (why := why_behind(worker, desired)) is not None]
    return list_names(behind, "; ", MAX_BEHIND) or NONE


def command_rows(state: FleetState) -> list[list[str]]:
    """Return the latest commands that are still in the desired state, with the number of workers that handled each.

    The sender of a command and the details of its result are only in the command result that the sender receives.
    """
    return [
        row
        for name, desired in sorted(state.desired.items())
        for row in _commands_of(desired, [worker for worker in state.workers if worker.model == name])
    ]


def _commands_of(desired: control.DesiredState, workers: Sequence[WorkerPresence]) -> Iterator[list[str]]:
    # A command for single workers is recorded once for each of them.
    named: dict[int, list[str]] = {}
    commands: dict[int, control.AnyCommand] = {}
    for recorded in desired.registers.values():
        commands[recorded.epoch] = recorded.command
    for worker, registers in desired.workers.items():
        for recorded in registers.values():
            commands[recorded.epoch] = recorded.command
            named.setdefault(recorded.epoch, []).append(worker)
    for epoch in sorted(commands, reverse=True)[:MAX_COMMANDS]:
        meant = [worker for worker in workers if epoch not in named or worker.worker in named[epoch]]
        done = sum(worker.epoch >= epoch for worker in meant)
        whom = "all" if epoch not in named else _name_workers(named[epoch])
        yield [_describe(commands[epoch]), desired.model, str(epoch), whom, f"{done:,} of {len(meant):,}"]


def _name_workers(workers: Sequence[str]) -> str:
    return workers[0] if len(workers) == 1 else f"{len(workers):,} workers"


def _describe(command: control.AnyCommand) -> str:
    """Return a command with its main parameter."""
    match command:
        case control.UpdateWeights() | control.FinishWeightUpdate():
            detail = f"{command.version}" + (f" ({command.label})" if command.label else "")
        case control.Pause():
            detail = str(command.mode)
        case control.Sleep():
            detail = str(command.level)
        case control.LoadLora():
            detail = f"{command.name} {command.version}"
        case control.UnloadLora():
            detail = command.name
        case _:
            detail = ""
    return f"{command.command} {detail}".rstrip()


def states_text(workers: Sequence[WorkerPresence]) -> str:
    """Return the states as text, for example `1,000 workers: 990 serving, 10 paused`."""
    counts = Counter(str(worker.state) for worker in workers)
    listed = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
    return f"{len(workers):,} worker{'s' * (len(workers) != 1)}" + (f": {listed}" if listed else "")


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


def heading(view: TopView, options: TopOptions, width: int | None = None) -> list[str]:
    """Return the two lines about the shown part of the fleet, with as many figures as fit."""
    workers = view.state.workers
    rates = Rates.sum(view.rates.of(worker.worker) for worker in workers)
    in_flight, room = sum(worker.in_flight for worker in workers), sum(map(slots_of, workers))
    figures = (
        f"{per_s(rates.tokens_per_s)} tokens/s",
        f"in flight {in_flight:,}/{room:,}",
        f"waiting {sum(depth.waiting for depth in view.state.queues):,}" if view.state.queues else "waiting -",
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


class Page:
    """The part of a longer text that is scrolled to."""

    def __init__(self) -> None:
        self.first = 0
        """Number of lines above the screen."""
        self._room = 1

    def draw(
        self, lines: Iterable[Text], width: int, height: int, above: Iterable[Text] = (), keys: str = "q quit"
    ) -> Text:
        """Return the part of the lines that fits a terminal of this size, between lines that stay and a line of keys.

        Args:
            above: lines that stay at the top.
            keys: the keys that have an effect beside those that scroll.
        """
        # Break lines between words, and within a word that is longer than the screen.
        head, pieces = (
            [piece for line in each for piece in ([line] if line.cell_len <= width else line.wrap(_CONSOLE, width))]
            for each in (above, lines)
        )
        self._room = room = max(height - len(head) - 1, 1)
        # The last page ends with the last line.
        self.first = first = max(min(self.first, len(pieces) - room), 0)
        shown = pieces[first : first + room]
        where = f"lines {first + 1:,} to {first + len(shown):,} of {len(pieces):,}"
        last = Text(f"{keys}  up, down, page: {where}"[:width], "dim")
        return Text("\n").join([*head, *shown, *[Text()] * (room - len(shown)), last][:height])

    def press(self, key: Key) -> bool:
        """Scroll. Return False if the key ends the display."""
        room = self._room
        steps = {"up": -1, "down": 1, "page_up": -room, "page_down": room, "home": -self.first, "end": _BEYOND}
        self.first = max(self.first + steps.get(key, 0), 0)
        return key != "quit"


def draw(view: TopView, options: TopOptions, page: Page, width: int, height: int) -> Text:
    """Return the screen of a terminal of this size: the figures of the fleet, its tables, and the workers.

    Tables stay above the workers, which scroll, as long as these have half of the screen. The others follow them.
    """
    view = _select(view, options)
    above = [Text(line, "bold" if not number else "") for number, line in enumerate(heading(view, options, width))]
    if view.problem is not None:
        above.append(Text(printable(view.problem), "bold red"))
    below: list[Text] = []
    for section in sections(view.state, view.rates):
        lines = _table(section, width, max(height // 8, 1))
        fits = not below and len(above) + len(lines) < height // 2
        (above if fits else below).extend(lines)
    workers = sorted_workers(view.state.workers, view.rates, options.sort)
    cells = [worker_cells(worker, view.rates.of(worker.worker)) for worker in workers]
    if options.model is not None or len({worker.model for worker in workers}) < 2:
        # The table of models has the model.
        cells = [[NONE if i == _MODEL else cell for i, cell in enumerate(row)] for row in cells]
    table = lay_out(COLUMNS, cells, width, SPARE_COLUMNS)
    above.append(Text(table.head, "reverse"))
    lines = []
    for worker, row in zip(workers, table.rows, strict=True):
        first = Text(row[0])
        first.stylize(_STYLES.get(worker.state, "red"), 0, len(status.state_cell(worker)))
        lines += [first, *map(Text, row[1:])]
    model = "all" if options.model is None else printable(options.model)
    return page.draw([*lines, *below], width, height, above, f"q quit  s sort: {options.sort}  p model: {model}")


def _select(view: TopView, options: TopOptions) -> TopView:
    return dataclasses.replace(view, state=status.of_model(view.state, options.model))


def _table(section: Section, width: int, most: int) -> list[Text]:
    titles = [*section.columns]
    if most < len(section.rows):
        titles[0] += f" ({most} of {len(section.rows):,})"
    table = lay_out(titles, section.rows[:most], width, section.spare)
    return [Text(table.head, "reverse"), *(Text(line) for row in table.rows for line in row)]


_CONSOLE: Final = Console()
"""`Text.wrap` needs one, but uses it only for texts that are justified."""


def print_top(view: TopView, options: TopOptions) -> None:
    """Print all workers with all columns, and the other tables, on stdout."""
    view = _select(view, options)
    write("\n".join(heading(view, options)))
    workers = sorted_workers(view.state.workers, view.rates, options.sort)
    workers_table = Section(COLUMNS, [worker_cells(worker, view.rates.of(worker.worker)) for worker in workers])
    for columns, cells, _ in (workers_table, *sections(view.state, view.rates)):
        write()
        print_table(columns, cells)


def top_as_json(view: TopView, options: TopOptions) -> JsonObject:
    """Return the JSON of `rollbus status --json` with the rates of the fleet, the models and the workers.

    With `options.model`, all but the rates of the fleet is of this model.
    """
    rates, state = view.rates, status.of_model(view.state, options.model)
    workers = sorted_workers(state.workers, rates, options.sort)
    models = {model: each for model, each in rates.of_models().items() if options.model in (None, model)}
    return status.state_as_json(replace(state, workers=tuple(workers))) | {
        "rates": {
            "fleet": _as_json(rates.of_fleet()),
            "models": {model: _as_json(each) for model, each in models.items()},
            "workers": {worker.worker: _as_json(rates.of(worker.worker)) for worker in workers},
        }
    }


def _as_json(rates: Rates) -> dict[str, float | None]:
    names = ("tokens_per_s", "requests_per_s", "first_token_s", "between_tokens_s", "prefix_hit")
    return {name: getattr(rates, name) for name in names}
