"""Computes advantages: the reward of each answer relative to the other answers of its group. Needs only numpy.

The last axis is the group: f[n] is one group, f[G, n] are G groups with n answers each.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from .errors import PackError

__all__ = ["group_advantages", "has_signal"]


def group_advantages(
    rewards: npt.ArrayLike, *, by: Literal["std", "mean", "leave_one_out"] = "std", eps: float = 1e-6
) -> npt.NDArray[np.float32]:
    """Return the advantages of answers from the rewards of their groups.

    Groups without signal, including groups with one answer, have advantages of exactly 0.0.

    Args:
        rewards: f[..., n].
        by: `std` (default): subtract the group's mean, and divide by its standard deviation (of n, not n - 1) plus
            `eps`, as in GRPO (Z. Shao et al., "DeepSeekMath", 2024). `mean`: subtract the mean, as in Dr. GRPO, which
            keeps the weight of easy and hard prompts (Z. Liu et al., "Understanding R1-Zero-Like Training", 2025).
            `leave_one_out`: subtract the mean of the other answers, as in RLOO, which is unbiased (A. Ahmadian et al.,
            "Back to Basics", 2024).
        eps: added to the standard deviation with `std`, at least 0 (default: 1e-6).

    Returns:
        f4, with the shape of `rewards`.

    Raises:
        PackError: a reward is not a finite number, a group is empty, or `by` or `eps` is not valid.
    """
    if by not in ("std", "mean", "leave_one_out"):
        raise PackError(f"by is {by!r}; allowed: std, mean, leave_one_out")
    if not 0 <= eps < np.inf:
        raise PackError(f"eps is {eps}; allowed: finite numbers, 0 and above")
    groups = _checked(rewards)
    size = groups.shape[-1]
    advantages = groups - groups.mean(axis=-1, keepdims=True)
    if by == "leave_one_out":
        advantages *= size / max(size - 1, 1)
    # A group without signal has a deviation of 0, or almost 0 if its mean is rounded.
    signal = has_signal(groups)[..., None]
    if by == "std":
        advantages /= np.where(signal, groups.std(axis=-1, keepdims=True) + eps, 1.0)
    return np.where(signal, advantages, 0.0).astype(np.float32)


def has_signal(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return True for each group with two different rewards. The other groups do not change the model.

        rewards = rewards[has_signal(rewards)]                                # f[G, n]
        groups = [group for group in groups if has_signal(group.rewards)]     # of different sizes

    Args:
        rewards: f[..., n].

    Returns:
        bool[...]; a single bool for one group.

    Raises:
        PackError: a reward is not a finite number, or a group is empty.
    """
    groups = _checked(rewards)
    return np.asarray(groups.max(axis=-1) > groups.min(axis=-1))


def _checked(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the rewards in float64, so that rounding of a group's mean is smaller than differences of its rewards."""
    try:
        groups = np.asarray(rewards, np.float64)
    except (TypeError, ValueError):
        raise PackError("rewards are not numbers, or their groups differ in size; allowed: f[n], or f[G, n]") from None
    if groups.ndim == 0 or not groups.shape[-1]:
        raise PackError(f"rewards have the shape {groups.shape}; allowed: [n] or [G, n] with n of at least 1")
    if not np.isfinite(groups).all():
        index = tuple(int(each) for each in np.argwhere(~np.isfinite(groups))[0])
        raise PackError(f"rewards{list(index)} is {groups[index]}; allowed: finite numbers")
    return groups
