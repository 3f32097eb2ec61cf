"""What an answer is worth beside the others to the same prompt, from the rewards of its group. Numpy alone.

The last axis is the group: f[n] is one group, f[G, n] are G groups of n answers each.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from .errors import PackError

__all__ = ["group_advantages", "has_signal"]


def group_advantages(
    rewards: npt.ArrayLike, *, by: Literal["std", "mean", "leave_one_out"] = "std", eps: float = 1e-6
) -> npt.NDArray[np.float32]:
    """Advantages of answers: their rewards beside those of their group.

    Groups without signal have advantages of exactly 0.0, a group of one answer too.

    Args:
        rewards: f[..., n].
        by: `std`: less the group's mean, divided by its standard deviation (of n, not n - 1) and `eps`, as in GRPO
            (Z. Shao et al., "DeepSeekMath", 2024). `mean`: less the mean, as in Dr. GRPO, which leaves easy and hard
            prompts their weight (Z. Liu et al., "Understanding R1-Zero-Like Training", 2025). `leave_one_out`: less
            the mean of the other answers, as in RLOO, which is unbiased (A. Ahmadian et al., "Back to Basics", 2024).
        eps: 0 and above; for `std`.

    Returns:
        f4, of the shape of `rewards`.

    Raises:
        PackError: rewards that are no finite numbers, an empty group, or another `by` or `eps`.
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
    # A group without signal has a deviation of 0, or nearly so where its mean is rounded.
    signal = has_signal(groups)[..., None]
    if by == "std":
        advantages /= np.where(signal, groups.std(axis=-1, keepdims=True) + eps, 1.0)
    return np.where(signal, advantages, 0.0).astype(np.float32)


def has_signal(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """True for each group of which two rewards differ: the others would train nothing, and may be left out.

        rewards = rewards[has_signal(rewards)]                                # f[G, n]
        groups = [group for group in groups if has_signal(group.rewards)]     # of different sizes

    Args:
        rewards: f[..., n].

    Returns:
        bool[...]: of one group a single bool.

    Raises:
        PackError: rewards that are no finite numbers, or an empty group.
    """
    groups = _checked(rewards)
    return np.asarray(groups.max(axis=-1) > groups.min(axis=-1))


def _checked(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The rewards in float64: a group's mean is rounded less than its rewards differ."""
    try:
        groups = np.asarray(rewards, np.float64)
    except (TypeError, ValueError):
        raise PackError("rewards are no numbers, or of groups of different sizes; allowed: f[n], or f[G, n]") from None
    if groups.ndim == 0 or not groups.shape[-1]:
        raise PackError(f"rewards have the shape {groups.shape}; allowed: [n] or [G, n], with an answer in each group")
    if not np.isfinite(groups).all():
        index = tuple(int(each) for each in np.argwhere(~np.isfinite(groups))[0])
        raise PackError(f"rewards{list(index)} is {groups[index]}; allowed: finite numbers")
    return groups
