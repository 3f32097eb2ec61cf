"""The parts of a policy loss: advantages, the correction of sampler against trainer, and the mask of stale tokens.

Advantages need only numpy. Their last axis is the group: f[n] is one group, f[G, n] are G groups with n answers each.

The sampler's and the trainer's probabilities of a token differ for three reasons: the weights have changed, the kernels
round differently, and in a mixture of experts, a router that rounds differently chooses other experts. Router replay
removes the third reason. The functions that measure or correct this take aligned log probabilities, like those of
`MicroBatch`. They read only positions where the loss mask is on, so other values, including NaN, have no effect. They
compute in float32 and do not wait for the device.

For a trainer at version V with a lag of N, tokens of versions V - N and later are fresh. All others are stale.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from .errors import PackError, check_integer
from .packing import MicroBatch, segment_indices
from .stitching import Sample, check_samples


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
    groups = _check_rewards(rewards)
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
    groups = _check_rewards(rewards)
    return np.asarray(groups.max(axis=-1) > groups.min(axis=-1))


def _check_rewards(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
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


def importance_weights(
    trainer_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return truncated importance weights for a token's loss: `min(exp(trainer - sampler), cap)`.

    Truncation limits the variance of a few large ratios and adds a small bias: E. L. Ionides, "Truncated Importance
    Sampling", Journal of Computational and Graphical Statistics 17(2), 2008. For its use between the sampler and the
    trainer of one policy, see F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    2025.

    Args:
        trainer_logprobs: f[B, T]. Gradients do not flow through the weights.
        sampler_logprobs: f[B, T]. If a value is -inf, the ratio of the token and of its sequence is `cap`.
        loss_mask: bool[B, T].
        cap: upper bound of the weights, above 0 (default: 2.0). `math.inf`: no truncation.
        level: `token` (default): the ratio of each token. `sequence`: the product of the ratios of all trained tokens
            of the sequence, truncated once.
        cu_seqlens: i32[n + 1]: first position of each sequence, and the end of the last one, as in `MicroBatch`.
            Required with `sequence`, which also requires B = 1.

    Returns:
        f32[B, T], detached. 0.0 where the loss mask is off.

    Raises:
        PackError: the shapes differ, `cap`, `level` or `cu_seqlens` is not valid, or `cu_seqlens` is missing with
            `sequence`.
    """
    if not cap > 0:
        raise PackError(f"cap is {cap}; allowed: above 0")
    log_ratio = _log_ratio(trainer_logprobs, sampler_logprobs, loss_mask)
    if level == "sequence":
        log_ratio = _sum_by_sequence(log_ratio, cu_seqlens)
    elif level != "token":
        raise PackError(f"level is {level!r}; allowed: token, sequence")
    return torch.where(loss_mask, log_ratio.exp().clamp(max=cap), 0.0)


def sampler_kl(
    trainer_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    estimator: Literal["k1", "k3"] = "k3",
) -> torch.Tensor:
    """Return an estimate of KL(sampler || trainer) per token, from the tokens that the sampler chose.

    With `d = trainer - sampler`, k1 is the mean of `-d`: it is unbiased and can be negative. k3 is the mean of
    `exp(d) - 1 - d`: it is unbiased, never negative, and has a lower variance. See J. Schulman, "Approximating KL
    Divergence", 2020. To combine several micro-batches, weight each estimate by its number of trained tokens.

    Args:
        trainer_logprobs: f[B, T].
        sampler_logprobs: f[B, T]. A value of -inf makes the estimate infinite, because the sampler could not choose
            that token.
        loss_mask: bool[B, T].
        estimator: `k1` or `k3` (default).

    Returns:
        f32[], detached. 0.0 if no token is trained.

    Raises:
        PackError: the shapes differ, or `estimator` is not valid.
    """
    log_ratio = _log_ratio(trainer_logprobs, sampler_logprobs, loss_mask)
    if estimator == "k1":
        # Ratios of infinity and 0 have no sum. The infinite ratio decides: the sampler could not choose that token.
        total = torch.where((log_ratio == math.inf).any(), -math.inf, -log_ratio.sum())
    elif estimator == "k3":
        # expm1(d) - d keeps precision: in float32, exp(d) - 1 - d loses values of d below 1e-4.
        total = torch.where(log_ratio == math.inf, math.inf, torch.expm1(log_ratio) - log_ratio).sum()
    else:
        raise PackError(f"estimator is {estimator!r}; allowed: k1, k3")
    return total / loss_mask.sum().clamp(min=1)


def _log_ratio(trainer: torch.Tensor, sampler: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return f32[B, T]: trainer - sampler, inf where both are -inf, and 0.0 where the loss mask is off."""
    if not trainer.shape == sampler.shape == loss_mask.shape or trainer.ndim != 2 or loss_mask.dtype != torch.bool:
        raise PackError(
            f"trainer_logprobs {tuple(trainer.shape)}, sampler_logprobs {tuple(sampler.shape)}, loss_mask"
            f" {tuple(loss_mask.shape)} of {loss_mask.dtype}; allowed: all [B, T], and a mask of torch.bool"
        )
    ours, theirs = trainer.detach().float(), sampler.detach().float()
    ratio = torch.where((ours == -math.inf) & (theirs == -math.inf), math.inf, ours - theirs)
    return torch.where(loss_mask, ratio, 0.0)


def _sum_by_sequence(log_ratio: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return for each token the sum over its sequence. In float64, because exp follows a sum of thousands of values."""
    shape = None if cu_seqlens is None else tuple(cu_seqlens.shape)
    if cu_seqlens is None or log_ratio.shape[0] != 1 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise PackError(
            f'level="sequence" with cu_seqlens of shape {shape} and logprobs of shape {tuple(log_ratio.shape)};'
            " allowed: [n + 1] and [1, T]"
        )
    segments = segment_indices(cu_seqlens.to(log_ratio.device), log_ratio.shape[1])
    sums = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float64, device=log_ratio.device)
    # The lowest number replaces -inf, with the same exp. Otherwise inf and -inf in one sequence would give NaN.
    sums.index_add_(0, segments, log_ratio[0].double().clamp(min=torch.finfo(torch.float32).min))
    return sums[segments].float()[None]


def mask_stale(batch: MicroBatch, *, version: int, max_lag: int) -> MicroBatch:
    """Return the micro-batch with the loss mask off and log probabilities of 0.0 for stale tokens.

    All other tensors are shared with `batch`.

    Args:
        batch: micro-batch; it is not changed.
        version: version of the trainer's weights.
        max_lag: maximum number of versions that a token may be behind, at least 0.

    Raises:
        PackError: `version` or `max_lag` is not an integer, or `max_lag` is negative.
    """
    mask = batch.loss_mask & (batch.weight_versions >= _oldest(version, max_lag))
    return dataclasses.replace(batch, loss_mask=mask, sampler_logprobs=torch.where(mask, batch.sampler_logprobs, 0.0))


def drop_stale(
    samples: Iterable[Sample], *, version: int, max_lag: int, by: Literal["oldest", "newest"] = "oldest"
) -> list[Sample]:
    """Return the fresh samples, in order.

    Args:
        samples: samples to filter. A sample without trained tokens is never stale.
        version: version of the trainer's weights.
        max_lag: maximum number of versions that a sample may be behind, at least 0.
        by: `oldest` (default): the oldest trained token gives the age of a sample, so kept samples have no stale token.
            `newest`: the newest trained token gives the age, so only completely stale samples are dropped; `mask_stale`
            masks the remaining stale tokens.

    Raises:
        PackError: `version` or `max_lag` is not an integer, `max_lag` is negative, `by` is not valid, or an item is no
            sample.
    """
    if by not in ("oldest", "newest"):
        raise PackError(f"by is {by!r}; allowed: oldest, newest")
    oldest = _oldest(version, max_lag)

    def is_fresh(sample: Sample) -> bool:
        versions = sample.weight_versions[sample.loss_mask]
        return not len(versions) or int(versions.min() if by == "oldest" else versions.max()) >= oldest

    return [sample for sample in check_samples(samples) if is_fresh(sample)]


def _oldest(version: int, max_lag: int) -> int:
    return check_integer(PackError, "version", version) - check_integer(PackError, "max_lag", max_lag, 0)
