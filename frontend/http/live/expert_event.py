"""The `experts` event: how often the routers chose each expert in the last minute, and how uneven the load is."""

import base64
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from ....bus.protocol.telemetry.expert_answers import ExpertAnswers
from ....bus.protocol.telemetry.expert_window import ExpertWindow, PlaneLoad, imbalance

__all__ = ["ExpertsEvent", "ExpertsPoint", "experts_event", "experts_point", "with_last_counts"]

MAX_NAMED: Final = 5
"""Limit on workers whose problem the event names. It counts the others."""
MAX_COUNT: Final = 2**32 - 1
"""Limit on the count of one expert in the event. No fleet reaches it within a minute."""


class PlaneEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load from prompt positions, or from generated tokens."""

    counts: str | None = None
    """Base64 of <u4[num_layers, num_experts]; absent from `versions`."""
    computed: int = msgspec.field()
    """Number of positions that engines computed."""
    seen: int = msgspec.field()
    """Number of these positions that were counted."""
    max_over_mean: list[float] = msgspec.field()
    """By layer: the load of the busiest expert divided by the mean load. 1 means even."""
    entropy: list[float] = msgspec.field()
    """Entropy by layer. 1 means even."""
    unused: list[int] = msgspec.field()
    """By layer: number of experts that were never chosen."""
    kept: str | None = None
    """The last minute has no tokens, so these are earlier counts: `minute`, of the minute until `counted_at`, or
    `version`, all of the newest weight version since the workers started. Absent: the counts are of the last minute."""
    counted_at: float | None = None
    """With `kept`: Unix time of the last counted minute; absent if unknown."""


class VersionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """All counts of one weight version."""

    weight_version: int
    seconds: float | None = None
    """Always null: unknown."""
    prompt: PlaneEvent
    generated: PlaneEvent


class PlanePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of all layers with a router, of one plane."""

    max_over_mean: float
    """Mean over the layers."""
    worst: float
    """Largest `max_over_mean` of a layer."""
    entropy: float
    """Mean over the layers."""
    unused: int
    """Sum over the layers."""


class ExpertsPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the minute before a time."""

    at: float
    """Unix time."""
    weight_version: int
    """Newest weight version that was counted."""
    prompt: PlanePoint | None
    """None if no prompt position was counted."""
    generated: PlanePoint | None
    """None if no generated token was counted."""


class ExpertsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a model's experts, from sampled workers or from one worker."""

    model: str
    worker: str | None
    """None if the event covers up to 64 sampled workers."""
    at: float
    """Unix time."""
    seconds: float = 0.0
    """Total length of the counted intervals."""
    workers_asked: int = 0
    workers_answered: int = 0
    """Number of workers whose counts are in the sum."""
    workers_total: int = 0
    """Number of live workers of the model."""
    problem: str | None = None
    """Which workers are left out and why, or why there are no counts."""
    num_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    planes: dict[str, PlaneEvent] | None = None
    """`prompt` and `generated`; None if no worker has ever answered."""
    versions: tuple[VersionEvent, ...] = ()
    over_time: tuple[ExpertsPoint, ...] = ()
    """Points of up to the last hour, recorded only while there were viewers."""


def experts_event(
    answers: ExpertAnswers,
    versions: ExpertAnswers | None,
    over_time: Iterable[ExpertsPoint],
    *,
    worker: str | None,
    at: float,
) -> ExpertsEvent:
    """Build the event.

    Args:
        answers: the counts of the last minute.
        versions: all counts by weight version; None if the workers were not asked yet.
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


def with_last_counts(event: ExpertsEvent, versions: ExpertAnswers | None, before: ExpertsEvent | None) -> ExpertsEvent:
    """Return the event with earlier counts for each plane without a token in the last minute.

    Args:
        versions: all counts by weight version; None if the workers were not asked yet.
        before: the previous event, with the counts that it kept; None for the first one.
    """
    planes = dict(event.planes or {})
    if before is not None and before.planes is not None:
        if event.planes is None or _shape(event) == _shape(before):
            for name, last in before.planes.items():
                if last.seen and (name not in planes or not planes[name].seen):
                    planes[name] = msgspec.structs.replace(
                        last, kept=last.kept or "minute", counted_at=last.counted_at if last.kept else before.at
                    )
        if event.planes is None:
            shape = dict(zip(("num_layers", "num_experts", "top_k"), _shape(before), strict=True))
            event = msgspec.structs.replace(event, **shape, versions=event.versions or before.versions)
    window = None if versions is None else versions.window
    if window is not None and window.shape == _shape(event):
        for name, plane in planes.items():
            found = next((load for each in window.versions if (load := getattr(each, name)).seen), None)
            if not plane.seen and found is not None:
                counted = _plane(found, window.shape.top_k, has_counts=True)
                planes[name] = msgspec.structs.replace(counted, kept="version")
    return msgspec.structs.replace(event, planes=planes or None)


def _shape(event: ExpertsEvent) -> tuple[int, int, int]:
    return event.num_layers, event.num_experts, event.top_k


def experts_point(window: ExpertWindow | None, at: float) -> ExpertsPoint | None:
    """Return the point of a window; None if no token was counted."""
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
