"""The `experts` event: how often workers' routers chose each expert in the last minute, and how uneven that is."""

import base64
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from ....bus.protocol.telemetry.expert_answers import ExpertAnswers
from ....bus.protocol.telemetry.expert_window import ExpertWindow, PlaneLoad, imbalance

__all__ = ["ExpertsEvent", "ExpertsPoint", "experts_event", "experts_point"]

MAX_NAMED: Final = 5
"""Workers whose problem is told; of the others the number."""
MAX_COUNT: Final = 2**32 - 1
"""Of one expert in a picture: more than a minute of any fleet."""


class PlaneEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of prompt positions, or of generated tokens."""

    counts: str | None = None
    """Base64 of <u4[num_layers, num_experts]; left out of versions."""
    computed: int = msgspec.field()
    """Positions that engines computed."""
    seen: int = msgspec.field()
    """Of these, the positions that were counted."""
    max_over_mean: list[float] = msgspec.field()
    """By layer: the busiest expert next to an even share; 1: even."""
    entropy: list[float] = msgspec.field()
    """By layer; 1: even."""
    unused: list[int] = msgspec.field()
    """By layer: experts without a choice."""


class VersionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was counted under one version of the weights."""

    weight_version: int
    seconds: float | None = None
    """Not known."""
    prompt: PlaneEvent
    generated: PlaneEvent


class PlanePoint(msgspec.Struct, frozen=True, kw_only=True):
    """All layers that route, of one plane."""

    max_over_mean: float
    """Mean of the layers."""
    worst: float
    """The largest of a layer."""
    entropy: float
    """Mean of the layers."""
    unused: int
    """Of all layers."""


class ExpertsPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The last minute before a time."""

    at: float
    """Unix time."""
    weight_version: int
    """The newest that was counted."""
    prompt: PlanePoint | None
    """None: no prompt position was counted."""
    generated: PlanePoint | None
    """None: no generated token was counted."""


class ExpertsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a model's experts, of sampled workers or of one."""

    model: str
    worker: str | None
    """None: of at most 64 sampled workers."""
    at: float
    """Unix time."""
    seconds: float = 0.0
    """How long the intervals are together."""
    workers_asked: int = 0
    workers_answered: int = 0
    """Those whose counts are in the sum."""
    workers_total: int = 0
    """Live workers of the model."""
    problem: str | None = None
    """Which workers are left out, and why; or why there is nothing."""
    num_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    planes: dict[str, PlaneEvent] | None = None
    """`prompt` and `generated`; None: no worker answered."""
    versions: tuple[VersionEvent, ...] = ()
    over_time: tuple[ExpertsPoint, ...] = ()
    """While somebody has watched, the last hour at most."""


def experts_event(
    answers: ExpertAnswers,
    versions: ExpertAnswers | None,
    over_time: Iterable[ExpertsPoint],
    *,
    worker: str | None,
    at: float,
) -> ExpertsEvent:
    """Make the event.

    Args:
        answers: of the last minute.
        versions: everything that was counted; None: not asked for yet.
    """
    window = answers.window
    common = ExpertsEvent(
        model=answers.model,
        worker=worker,
        at=at,
        workers_asked=len(answers.asked),
        workers_total=answers.num_workers,
        problem=_problem(answers),
        over_time=tuple(over_time),
    )
    if window is None:
        return common
    shape = window.shape
    by_version = () if versions is None or versions.window is None else versions.window.versions
    return msgspec.structs.replace(
        common,
        seconds=round(window.seconds, 1),
        workers_answered=len(window.workers),
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        planes={
            "prompt": _plane(window.prompt, shape.top_k, has_counts=True),
            "generated": _plane(window.generated, shape.top_k, has_counts=True),
        },
        versions=tuple(
            VersionEvent(
                weight_version=each.weight_version,
                prompt=_plane(each.prompt, shape.top_k),
                generated=_plane(each.generated, shape.top_k),
            )
            for each in by_version
        ),
    )


def experts_point(window: ExpertWindow | None, at: float) -> ExpertsPoint | None:
    """Make the point of a window; None: no token was counted."""
    if window is None or not window.versions:
        return None
    top_k = window.shape.top_k
    return ExpertsPoint(
        at=at,
        weight_version=window.versions[0].weight_version,
        prompt=_plane_point(window.prompt, top_k),
        generated=_plane_point(window.generated, top_k),
    )


def _plane_point(load: PlaneLoad, top_k: int) -> PlanePoint | None:
    if not load.seen:
        return None
    found = imbalance(load.counts, top_k).summary()
    return PlanePoint(
        max_over_mean=round(found.max_over_mean, 4),
        worst=round(found.worst, 4),
        entropy=round(found.entropy, 4),
        unused=found.unused,
    )


def _plane(load: PlaneLoad, top_k: int, *, has_counts: bool = False) -> PlaneEvent:
    uneven = imbalance(load.counts, top_k)
    counts = np.minimum(load.counts, MAX_COUNT).astype("<u4")
    return PlaneEvent(
        counts=base64.b64encode(counts.tobytes()).decode() if has_counts else None,
        computed=load.computed,
        seen=load.seen,
        max_over_mean=np.round(uneven.max_over_mean, 4).tolist(),
        entropy=np.round(uneven.entropy, 4).tolist(),
        unused=uneven.unused.tolist(),
    )


def _problem(answers: ExpertAnswers) -> str | None:
    if not answers.left_out:
        return None if answers.window is not None else "no worker has answered"
    named = [f"{worker}: {why}" for worker, why in sorted(answers.left_out.items())]
    more = len(named) - MAX_NAMED
    return "; ".join(named[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
