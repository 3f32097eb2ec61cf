"""The result of a trainer's step over groups of answers: the groups, and the lengths of their answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from ...schemas.chunk import FinishReason
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
    version: int | None = None
    """Version of the trainer's weights: the one that `step` was called with, or the newest one of a live worker."""
    paused_s: float = 0.0
    """Seconds of the step in which the model was paused, for example for an update of its weights."""

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

    def metrics(
        self,
        *,
        rewards: Iterable[ArrayLike] | None = None,
        trainer_logprobs: Iterable[ArrayLike] | None = None,
    ) -> dict[str, float]:
        """Return the numbers of this step by name, for `wandb.log`, `trackio.log`, TensorBoard or another logger.

        Means are over answers, and staleness over tokens. A name is missing if there is nothing to count.

        Args:
            rewards: for each group, the rewards of its answers.
            trainer_logprobs: for each answer of each group, in order, f[G]: the trainer's log probabilities of its
                tokens. With these, `kl` is the estimate k3 of KL(sampler || trainer).

        Raises:
            ValueError: there is not a reward for each answer, or not a log probability for each token.
        """
        answers = [generation for group in self.groups for generation in group.generations]
        numbers: dict[str, Any] = {
            "groups": len(self.groups),
            "answers": len(answers),
            "dropped": len(self.dropped),
            "failed": len(self.failed),
            "resumed": sum(answer.attempts > answer.parts for answer in answers),
            "continued": sum(answer.parts > 1 for answer in answers),
            "tokens_per_s": self.stats.tokens_per_s,
            "wait_s": self.stats.seconds,
            "pause_s": self.stats.paused_s,
        }
        if not answers:
            return {name: float(value) for name, value in numbers.items()}
        lengths = self.stats.taken
        numbers |= {"length/mean": lengths.mean(), "length/max": lengths.max(), "length/min": lengths.min()}
        numbers["length/truncated"] = np.mean([answer.finish_reason is FinishReason.LENGTH for answer in answers])
        versions = np.concatenate([_versions(answer) for answer in answers])
        if self.stats.version is not None and len(versions):
            lags = np.maximum(self.stats.version - versions.astype("i8"), 0)
            numbers |= {"staleness/mean": lags.mean(), "staleness/max": lags.max()}
        if rewards is not None:
            flat = np.concatenate([np.asarray(group, float).ravel() for group in rewards])
            if len(flat) != len(answers):
                raise ValueError(f"rewards has {len(flat)} numbers; allowed: {len(answers)}, one for each answer")
            numbers |= {"reward/mean": flat.mean(), "reward/std": flat.std()}
        if trainer_logprobs is not None:
            numbers["kl"] = _kl(answers, [np.asarray(array, float) for array in trainer_logprobs])
        return {name: float(value) for name, value in numbers.items()}

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


def _kl(answers: Sequence[Generation], trainer: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return the estimate of `rollbus.trainer.sampler_kl`: infinite if the sampler could not choose a token."""
    given = [len(array) for array in trainer]
    if given != (lengths := [len(answer.token_ids) for answer in answers]):
        raise ValueError(
            f"trainer_logprobs has arrays of lengths {given[:8]}; allowed: those of the answers, {lengths[:8]}"
        )
    sampler = [answer.logprobs for answer in answers if answer.logprobs is not None]
    if len(sampler) != len(answers):
        raise ValueError(
            "trainer_logprobs are given, but the answers have none; allowed: with `logprobs` in `sampling`"
        )
    ours, theirs = np.concatenate(trainer), np.concatenate(sampler).astype(float)
    ratio = np.where(np.isneginf(theirs), np.inf, ours - np.where(np.isneginf(theirs), 0.0, theirs))
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.where(np.isinf(ratio), np.inf, np.expm1(ratio) - ratio)
    return float(terms.mean()) if len(terms) else 0.0
