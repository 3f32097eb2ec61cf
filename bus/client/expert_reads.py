"""Asks the workers of one model for the load of their experts. Runs on the bus thread."""

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from ...schemas.checks import check_float
from ...schemas.control import ReadExperts
from ...schemas.errors import InvalidRequest
from ...schemas.telemetry import ExpertLoad
from ..control.controller import Controller, check_command
from ..protocol.telemetry.expert_answers import choose_workers, loads_of
from ..protocol.telemetry.expert_book import INTERVAL_S

__all__ = ["HeardLoads", "experts_command", "read_experts"]

KEPT_S: Final = 120.0
"""Seconds for which workers keep their counts."""
MAX_CLOCK_S: Final = 20.0
"""Tolerated clock difference in seconds. With it, a request for one minute still returns two thirds of the minute."""


class HeardLoads(NamedTuple):
    """The answers of the workers."""

    model: str
    loads: Mapping[str, ExpertLoad]
    """Expert load by worker."""
    left_out: Mapping[str, str]
    """Workers without counts, each with the reason."""
    asked: tuple[str, ...]
    num_workers: int


def experts_command(
    model: str | None, workers: tuple[str, ...] | None, last_s: float | None, timeout_s: float
) -> ReadExperts:
    """Build the command that asks for the last `last_s` seconds, by this machine's clock. None: all counts by version.

    Raises:
        InvalidRequest: `last_s` is not a valid time.
    """
    if last_s is None:
        return ReadExperts(model=model, workers=workers, window="versions", timeout_s=timeout_s)
    last_s = check_float("last_s", last_s, 0, KEPT_S)
    since = max(int((time.time() - last_s) / INTERVAL_S) - 1, 0)
    return ReadExperts(model=model, workers=workers, since=since, timeout_s=timeout_s)


async def read_experts(controller: Controller, command: ReadExperts) -> HeardLoads:
    """Ask the workers that `command` names, at most 64, and return the answers that arrive in time.

    Raises:
        As `Controller.read`. Also `InvalidRequest` if `command` names no model and the fleet has several models.
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
    """Return the reason if the worker's last seconds differ from this machine's because of its clock, else None."""
    ahead_s = load.number * INTERVAL_S - (time.time() - INTERVAL_S)
    if abs(ahead_s) <= MAX_CLOCK_S:
        return None
    return f"the worker's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's clock"
