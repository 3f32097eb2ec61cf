"""The result of a trainer's step over groups of answers: the groups, and the lengths of their answers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...schemas.errors import RequestError
from ...schemas.request import GenerateRequest
from ..protocol.html import as_html
from .generation import Generation

__all__ = ["Group", "GroupStats", "GroupStep", "lengths_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The answers to one prompt."""

    key: object
    """The key of the caller's `GroupPrompt`. None without a key."""
    request: GenerateRequest
    """Request for all samples, as it was first sent."""
    generations: tuple[Generation, ...]
    """Results, one for each sample, in order. The parts of a continued answer are joined. The answers of a dropped or
    failed group have the tokens received so far."""
    steps: int
    """Number of steps that generated the group. 1: no part comes from an earlier step."""
    error: RequestError | None = None
    """Cause of the failure. None if the group did not fail."""

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        return f"<Group key={self.key!r} answers={len(self.generations)} steps={self.steps}>"

    @property
    def oldest_version(self) -> int | None:
        """Weight version of the oldest token, or adapter version if an adapter is used. None without tokens."""
        versions = [_versions(generation) for generation in self.generations if len(generation.token_ids)]
        return min((int(array.min()) for array in versions), default=None)


def _versions(generation: Generation) -> npt.NDArray[np.int32]:
    # Tokens have an adapter's version also if the adapter answers under the model's name.
    return generation.weight_versions if generation.lora_versions is None else generation.lora_versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStats:
    """Statistics of one step: the lengths of its answers, and its duration.

    Short answers end first. The answers in `taken` are therefore shorter than the average of all answers, unless later
    steps take every carried group. Groups that are dropped for their age are longer. The lengths show this bias.
    """

    taken: npt.NDArray[np.int32]
    """i4[answers]: number of tokens of each answer in this step's groups."""
    carried: npt.NDArray[np.int32]
    """i4[answers]: number of tokens received so far for each answer of the groups that stay, including ended answers.
    Tokens that the client had not received when the step ended are not counted."""
    dropped: npt.NDArray[np.int32]
    """i4[answers]: number of tokens of each answer in the dropped groups."""
    seconds: float
    """Seconds from the call of `step` to its return."""
    started: int
    """Number of groups that the step started."""
    continued: int
    """Number of groups that the step continued from their tokens."""
    carried_complete: int
    """Number of carried groups that are complete. The next step returns them first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of `taken` per second of the step."""
        return float(self.taken.sum()) / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        """Return one line with means, without contents."""
        parts = {"taken": self.taken, "carried": self.carried, "dropped": self.dropped}
        means = " ".join(f"{name}={len(a)}x{a.mean() if len(a) else 0:.1f}" for name, a in parts.items())
        return f"<GroupStats {means} seconds={self.seconds:.3f} tokens_per_s={self.tokens_per_s:.1f}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStep:
    """One step of a trainer. A step is true if it has any group. After the last prompt, the last step is false."""

    groups: tuple[Group, ...]
    """Groups to train on: `need` groups, or fewer if the prompts are used up or too many groups failed."""
    dropped: tuple[Group, ...]
    """Groups that are too old for `max_lag`, or that cannot be continued exactly with `inexact="drop"`."""
    failed: tuple[Group, ...]
    """Groups that failed, each with its `error`. The step started other groups in their place."""
    stats: GroupStats
    """Counts and durations of the step."""

    def __bool__(self) -> bool:
        """Return True if the step has any group, also a dropped or a failed one."""
        return bool(self.groups or self.dropped or self.failed)

    def __repr__(self) -> str:
        """Return one line with counts."""
        counts = f"groups={len(self.groups)} dropped={len(self.dropped)} failed={len(self.failed)}"
        return f"<GroupStep {counts} {self.stats!r}>"

    def _repr_html_(self) -> str:
        stats = self.stats
        rows = [
            (name, len(getattr(self, name)), len(lengths), f"{lengths.mean():.1f}" if len(lengths) else "")
            for name, lengths in (
                ("groups", stats.taken),
                ("dropped", stats.dropped),
                ("failed", lengths_of(self.failed)),
            )
        ]
        title = f"Step of {stats.seconds:.1f} s, {stats.tokens_per_s:.0f} tokens/s"
        return as_html(title, rows, ("", "groups", "answers", "mean tokens"))


def lengths_of(groups: Iterable[Group]) -> npt.NDArray[np.int32]:
    """Return the number of tokens of each answer, i4[answers]."""
    return np.array([len(generation.token_ids) for group in groups for generation in group.generations], "i4")
