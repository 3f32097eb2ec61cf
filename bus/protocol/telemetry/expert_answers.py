"""Which workers are asked for the load of their experts, and what their answers come to. Pure."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....schemas.errors import InvalidRequest
from ....schemas.presence import WorkerPresence
from ....schemas.telemetry import ExpertLoad
from ..fleet.command_result import CommandResult
from .expert_window import ExpertWindow, merge_loads

__all__ = ["MAX_ASKED", "ExpertAnswers", "choose_workers", "loads_of", "merge_answers"]

MAX_ASKED: Final = 64
"""Workers: an answer may take 100 KB, and the routers of so many say what those of a thousand do."""


@dataclass(frozen=True, slots=True)
class ExpertAnswers:
    """What workers of one model answered about their experts."""

    model: str
    window: ExpertWindow | None
    """The sum of the answers; None: no worker answered with counts."""
    asked: tuple[str, ...]
    """Workers that were asked, sorted: all of the model's that can answer, or 64 of them."""
    left_out: dict[str, str]
    """Workers that are not in `window` though they were meant: why."""
    num_workers: int
    """Live workers of the model, asked or not."""


def choose_workers(
    workers: Sequence[WorkerPresence], named: Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Choose whom to ask: the named workers, or a sample that stays the same while its workers live.

    Args:
        workers: live ones of one model.
        named: these ids; None: any.

    Returns:
        The ids of at most 64 workers, sorted; and why others cannot answer.

    Raises:
        InvalidRequest: more than 64 are named.
    """
    meant = {worker.worker: worker for worker in workers}
    if named is not None:
        meant = {name: meant[name] for name in named if name in meant}
        if len(meant) > MAX_ASKED:
            raise InvalidRequest(
                field="workers", problem=f"names {len(meant)}", allowed=f"up to {MAX_ASKED}, or None for a sample"
            )
    unable = {name: why for name, worker in meant.items() if (why := _why_unable(worker)) is not None}
    able = sorted(meant.keys() - unable.keys(), key=lambda name: (zlib.crc32(name.encode()), name))
    return tuple(sorted(able[:MAX_ASKED])), unable


def _why_unable(worker: WorkerPresence) -> str | None:
    capabilities = worker.capabilities
    if capabilities is None:
        return f"it is {worker.state}"
    if not capabilities.telemetry_reads:
        return "it is of an earlier release, which does not answer this"
    if capabilities.routed_experts is None:
        return f"its engine returns no routing{f': {why}' if (why := capabilities.routing_refusal) else ''}"
    return None


def loads_of(result: CommandResult) -> tuple[dict[str, ExpertLoad], dict[str, str]]:
    """Return what the workers answered to a `read_experts`, and why the others did not."""
    loads = {worker: ack.experts for worker, ack in result.applied.items() if ack.experts is not None}
    silent = {worker: "its engine returns no routing" for worker in result.applied if worker not in loads}
    for acks in (result.failed, result.unsupported, result.stale, result.late):
        for worker, ack in acks.items():
            silent[worker] = f"it is at {ack.status}" if ack.error is None else ack.error.message
    return loads, silent | result.missing


def merge_answers(
    model: str, loads: Mapping[str, ExpertLoad], left_out: Mapping[str, str], asked: Sequence[str], num_workers: int
) -> ExpertAnswers:
    """Add up the answers; unusable ones are left out and named."""
    window, unusable = merge_loads(loads)
    return ExpertAnswers(model, window, tuple(asked), {**left_out, **unusable}, num_workers)
