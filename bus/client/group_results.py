"""What a trainer's step over groups of answers gives: the groups, and how long their answers are."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...schemas.errors import RequestError
from ...schemas.request import GenerateRequest
from .generation import Generation

__all__ = ["Group", "GroupStats", "GroupStep", "lengths_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The answers to one prompt."""

    key: object
    """The caller's, of its `GroupPrompt`; None without."""
    request: GenerateRequest
    """For all samples, as it was sent first."""
    generations: tuple[Generation, ...]
    """One for each sample, in order; continued ones are joined. Of a dropped or failed group what had come."""
    steps: int
    """In how many steps it was generated; 1: nothing of it was carried over."""
    error: RequestError | None = None
    """Why it failed; None otherwise."""

    def __repr__(self) -> str:
        """One line with sizes, no contents."""
        return f"<Group key={self.key!r} answers={len(self.generations)} steps={self.steps}>"

    @property
    def oldest_version(self) -> int | None:
        """Of the weights of its oldest token, with an adapter of the adapter's; None without tokens."""
        versions = [_versions(generation) for generation in self.generations if len(generation.token_ids)]
        return min((int(array.min()) for array in versions), default=None)


def _versions(generation: Generation) -> npt.NDArray[np.int32]:
    if generation.request.lora is None or generation.lora_versions is None:
        return generation.weight_versions
    return generation.lora_versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStats:
    """Of one step: how long its answers are, and how long it took.

    Short answers end first. So the taken ones are shorter than all are on average, unless every carried group is taken
    by a later step; what is dropped for its age is longer. The lengths tell how much.
    """

    taken: npt.NDArray[np.int32]
    """i4[answers]: tokens of each answer of the groups of this step."""
    carried: npt.NDArray[np.int32]
    """i4[answers]: tokens that each answer of the groups that stay has so far; ended ones count too. Tokens that were
    on their way when the step ended are not counted."""
    dropped: npt.NDArray[np.int32]
    """i4[answers]: tokens that each answer of the dropped groups had."""
    seconds: float
    """From the call of `step` to its return."""
    started: int
    """Groups that it started."""
    continued: int
    """Groups that it continued from their tokens."""
    carried_complete: int
    """Groups of `carried` that are complete: the next step takes them first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens to train, by the seconds that the step took."""
        return float(self.taken.sum()) / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        """One line with means, no contents."""
        parts = {"taken": self.taken, "carried": self.carried, "dropped": self.dropped}
        means = " ".join(f"{name}={len(a)}x{a.mean() if len(a) else 0:.1f}" for name, a in parts.items())
        return f"<GroupStats {means} seconds={self.seconds:.3f} tokens_per_s={self.tokens_per_s:.1f}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStep:
    """One step of a trainer. True if it brings anything: without prompts left, the last step brings nothing."""

    groups: tuple[Group, ...]
    """Those to train: `need` of them, or fewer when the prompts are used up or too many groups failed."""
    dropped: tuple[Group, ...]
    """Too old for `max_lag`, or not to be continued."""
    failed: tuple[Group, ...]
    """Each has its `error`; other groups were started in their place."""
    stats: GroupStats

    def __bool__(self) -> bool:
        """Return True if there is any group, also a dropped or a failed one."""
        return bool(self.groups or self.dropped or self.failed)

    def __repr__(self) -> str:
        """One line with counts."""
        counts = f"groups={len(self.groups)} dropped={len(self.dropped)} failed={len(self.failed)}"
        return f"<GroupStep {counts} {self.stats!r}>"


def lengths_of(groups: Iterable[Group]) -> npt.NDArray[np.int32]:
    """Return the tokens of each answer, i4[answers]."""
    return np.array([len(generation.token_ids) for group in groups for generation in group.generations], "i4")
