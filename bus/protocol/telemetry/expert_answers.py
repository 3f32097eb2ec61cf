"""Chooses the workers to ask for the load of their experts, and merges their answers. No I/O."""

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
"""The maximum number of workers to ask, because an answer may have 100 KB. This sample represents a thousand
workers."""


@dataclass(frozen=True, slots=True)
class ExpertAnswers:
    """The answers of one model's workers about their experts."""

    model: str
    """Name of the model."""
    window: ExpertWindow | None
    """The sum of the answers. None: no worker answered with counts."""
    asked: tuple[str, ...]
    """The workers that were asked, sorted: all workers of the model that can answer, or 64 of them."""
    left_out: dict[str, str]
    """Workers that should be in `window` and are not, each with the reason."""
    num_workers: int
    """Live workers of the model, asked or not."""


def choose_workers(
    workers: Sequence[WorkerPresence], named: Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Choose the workers to ask: the named workers, or a sample that stays the same while its workers are live.

    Args:
        workers: live workers of one model.
        named: these ids; None: any.

    Returns:
        The sorted ids of at most 64 workers, and the reason why each other worker cannot answer.

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
        return "the worker runs an earlier release, which does not answer this command"
    if capabilities.routed_experts is None:
        return f"its engine returns no routed experts{f': {why}' if (why := capabilities.routing_refusal) else ''}"
    return None


def loads_of(result: CommandResult) -> tuple[dict[str, ExpertLoad], dict[str, str]]:
    """Return the answers of the workers to a `read_experts`, and the reason for each missing answer."""
    loads = {worker: ack.experts for worker, ack in result.applied.items() if ack.experts is not None}
    silent = {worker: "its engine returns no routed experts" for worker in result.applied if worker not in loads}
    for acks in (result.failed, result.unsupported, result.stale, result.late):
        for worker, ack in acks.items():
            silent[worker] = f"its last ack is {ack.status}" if ack.error is None else ack.error.message
    return loads, silent | result.missing


def merge_answers(
    model: str, loads: Mapping[str, ExpertLoad], left_out: Mapping[str, str], asked: Sequence[str], num_workers: int
) -> ExpertAnswers:
    """Add up the answers. Name the workers with unusable answers."""
    window, unusable = merge_loads(loads)
    return ExpertAnswers(model, window, tuple(asked), {**left_out, **unusable}, num_workers)
