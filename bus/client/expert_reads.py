"""Asks workers of one model for the load of their experts, on the bus thread."""

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from ...schemas.checks import check_float
from ...schemas.control import ReadExperts
from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_TIMEOUT_S
from ...schemas.telemetry import ExpertLoad
from ..control.controller import Controller, check_command
from ..protocol.telemetry.expert_answers import choose_workers, loads_of
from ..protocol.telemetry.expert_book import INTERVAL_S

__all__ = ["HeardLoads", "experts_command", "read_experts"]

MAX_CLOCK_S: Final = 20.0
"""By which clocks may differ: of a minute that is asked for, two thirds are still there."""


class HeardLoads(NamedTuple):
    """What came of a question."""

    model: str
    loads: Mapping[str, ExpertLoad]
    """By worker."""
    left_out: Mapping[str, str]
    """Workers that did not answer with counts, or cannot: why."""
    asked: tuple[str, ...]
    num_workers: int


def experts_command(
    model: str | None, workers: tuple[str, ...] | None, last_s: float | None, timeout_s: float
) -> ReadExperts:
    """Make the command that asks for the last seconds, by this machine's clock; None: for everything, by versions.

    Raises:
        InvalidRequest: `last_s` is no time.
    """
    if last_s is None:
        return ReadExperts(model=model, workers=workers, window="versions", timeout_s=timeout_s)
    last_s = check_float("last_s", last_s, 0, MAX_TIMEOUT_S)
    since = max(int((time.time() - last_s) / INTERVAL_S) - 1, 0)
    return ReadExperts(model=model, workers=workers, since=since, timeout_s=timeout_s)


async def read_experts(controller: Controller, command: ReadExperts) -> HeardLoads:
    """Ask the workers that `command` means, at most 64, and return what they answered in time.

    Raises:
        As `Controller.read`; `InvalidRequest` also where `command` names no model and the fleet has several.
    """
    command = check_command(command)
    roster = await controller.roster(command)
    if len(roster) > 1:
        raise InvalidRequest(field="model", problem="is missing", allowed=f"one of {', '.join(roster)}")
    [(model, workers)] = roster.items()
    asked, left_out = choose_workers(workers, command.workers)
    if not asked:
        return HeardLoads(model, {}, left_out, asked, len(workers))
    result = await controller.read(replace(command, model=model, workers=asked))
    loads, silent = loads_of(result)
    if command.window == "recent":
        silent |= {name: problem for name, load in loads.items() if (problem := _clock_problem(load)) is not None}
        loads = {name: load for name, load in loads.items() if name not in silent}
    return HeardLoads(model, loads, left_out | silent, asked, len(workers))


def _clock_problem(load: ExpertLoad) -> str | None:
    """Say why this worker's last seconds are others than this machine's; None: they are the same."""
    ahead_s = load.number * INTERVAL_S - (time.time() - INTERVAL_S)
    if abs(ahead_s) <= MAX_CLOCK_S:
        return None
    return f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
