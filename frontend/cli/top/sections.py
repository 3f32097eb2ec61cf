"""The tables of `rollbus top` below the workers: queues, models with their desired states, and commands."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ....bus import FleetState
from ....bus.protocol.fleet.behind import why_behind
from ....bus.protocol.telemetry.fleet_rates import FleetRates
from ....schemas.control import AnyCommand, FinishWeightUpdate, LoadLora, Pause, Sleep, UnloadLora, UpdateWeights
from ....schemas.desired import DesiredState
from ....schemas.presence import WorkerPresence
from ..fleet_tables import PROBLEM_COLUMNS, QUEUE_COLUMNS, problem_rows, queue_rows, told_cells
from ..tables import NONE
from .workers_table import per_s

__all__ = ["COMMAND_COLUMNS", "MODEL_COLUMNS", "Section", "command_rows", "model_rows", "sections"]

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


def sections(state: FleetState, rates: FleetRates, model: str | None) -> list[Section]:
    """Return the tables that are not empty.

    Args:
        model: the model to show; None for all models.
    """
    depths = [depth for depth in state.queues if model in (None, depth.model)]
    problems = {name: why for name, why in state.queue_problems.items() if model in (None, name)}
    every = (
        Section(PROBLEM_COLUMNS, problem_rows(problems)),
        Section(QUEUE_COLUMNS, queue_rows(depths)),
        Section(MODEL_COLUMNS, model_rows(state, rates, model), MODEL_SPARE_COLUMNS),
        Section(COMMAND_COLUMNS, command_rows(state, model)),
    )
    return [section for section in every if section.rows]


def model_rows(state: FleetState, rates: FleetRates, model: str | None = None) -> list[list[str]]:
    """Return the rows of the models: totals of their workers, desired states, and workers that are behind."""
    by_model = _by_model(state)
    of_models = rates.of_models()
    rows = []
    for name, workers in sorted(by_model.items()):
        if model not in (None, name):
            continue
        desired = state.desired.get(name)
        rows.append(
            [
                name,
                f"{len(workers):,}",
                per_s(of_models[name].tokens_per_s) if name in of_models else NONE,
                NONE if desired is None else str(desired.epoch),
                *told_cells({} if desired is None else desired.registers),
                _behind(workers, desired or DesiredState(model=name)),
            ]
        )
    return rows


def _by_model(state: FleetState) -> dict[str, list[WorkerPresence]]:
    by_model: dict[str, list[WorkerPresence]] = {model: [] for model in state.desired}
    for worker in state.workers:
        by_model.setdefault(worker.model, []).append(worker)
    return by_model


def _behind(workers: Sequence[WorkerPresence], desired: DesiredState) -> str:
    behind = [f"{worker.worker} {why}" for worker in workers if (why := why_behind(worker, desired)) is not None]
    more = [f"and {len(behind) - MAX_BEHIND:,} more"] if len(behind) > MAX_BEHIND else []
    return "; ".join([*behind[:MAX_BEHIND], *more]) or NONE


def command_rows(state: FleetState, model: str | None = None) -> list[list[str]]:
    """Return the latest commands that are still in the desired state, with the number of workers that handled each.

    The sender of a command and the details of its result are only in the command result that the sender receives.
    """
    return [
        row
        for name, desired in sorted(state.desired.items())
        if model in (None, name)
        for row in _commands_of(desired, [worker for worker in state.workers if worker.model == name])
    ]


def _commands_of(desired: DesiredState, workers: Sequence[WorkerPresence]) -> Iterator[list[str]]:
    # A command for single workers is recorded once for each of them.
    named: dict[int, list[str]] = {}
    commands: dict[int, AnyCommand] = {}
    for recorded in desired.registers.values():
        commands[recorded.epoch] = recorded.command
    for worker, registers in desired.workers.items():
        for recorded in registers.values():
            commands[recorded.epoch] = recorded.command
            named.setdefault(recorded.epoch, []).append(worker)
    for epoch in sorted(commands, reverse=True)[:MAX_COMMANDS]:
        meant = [worker for worker in workers if epoch not in named or worker.worker in named[epoch]]
        done = sum(worker.epoch >= epoch for worker in meant)
        whom = "all" if epoch not in named else _named(named[epoch])
        yield [_describe(commands[epoch]), desired.model, str(epoch), whom, f"{done:,} of {len(meant):,}"]


def _named(workers: Sequence[str]) -> str:
    return workers[0] if len(workers) == 1 else f"{len(workers):,} workers"


def _describe(command: AnyCommand) -> str:
    """Return a command with its main parameter."""
    match command:
        case UpdateWeights() | FinishWeightUpdate():
            detail = f"{command.version}" + (f" ({command.label})" if command.label else "")
        case Pause():
            detail = str(command.mode)
        case Sleep():
            detail = str(command.level)
        case LoadLora():
            detail = f"{command.name} {command.version}"
        case UnloadLora():
            detail = command.name
        case _:
            detail = ""
    return f"{command.command} {detail}".rstrip()


def states_text(workers: Sequence[WorkerPresence]) -> str:
    """Return the states as text, for example `1,000 workers: 990 serving, 10 paused`."""
    counts = Counter(str(worker.state) for worker in workers)
    listed = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
    return f"{len(workers):,} worker{'s' * (len(workers) != 1)}" + (f": {listed}" if listed else "")
