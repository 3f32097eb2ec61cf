"""The sampler and the trainer disagree about the probability of what was sampled: by how much, and what to do.

They differ because the weights moved on, because their kernels round differently, and, in a mixture of experts,
because a router that rounds differently picks other experts; replay removes the last of these.

All functions take logprobs that are aligned, as those of `MicroBatch` are, and look at them only where the loss mask
is on: what stands elsewhere, NaN included, changes nothing. They compute in float32 and wait for no device.
"""

import math
from typing import Literal

import torch

from .errors import PackError
from .segments import segment_indices

__all__ = ["importance_weights", "sampler_kl"]


def importance_weights(
    trainer_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Truncated importance weights, to multiply a token's loss by: `min(exp(trainer - sampler), cap)`.

    Truncation bounds the variance that a few large ratios would bring, for a small bias: E. L. Ionides, "Truncated
    Importance Sampling", Journal of Computational and Graphical Statistics 17(2), 2008. Its use between the sampler
    and the trainer of one policy: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025.

    Args:
        trainer_logprobs: f[B, T]. Gradients do not flow through the weights.
        sampler_logprobs: f[B, T]. Where it is -inf, the ratio is `cap`, and so is that of its sequence.
        loss_mask: bool[B, T].
        cap: above 0; `math.inf` for no truncation.
        level: `token`: each token's own ratio. `sequence`: the product of the ratios of all trained tokens of its
            sequence, truncated once.
        cu_seqlens: i32[n + 1], for `sequence`, which needs it, with B = 1: where the sequences begin, and where the
            last ends. `MicroBatch` has it.

    Returns:
        f32[B, T], detached; 0.0 where the loss mask is off.

    Raises:
        PackError: shapes that differ, a `cap`, `level` or `cu_seqlens` that is not allowed, or `sequence` without
            `cu_seqlens`.
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
    """An estimate of KL(sampler || trainer) per token, from the tokens that the sampler drew.

    With `d = trainer - sampler`, k1 is the mean of `-d`: unbiased, and negative at times. k3 is the mean of
    `exp(d) - 1 - d`: unbiased too, never negative, and of lower variance. J. Schulman, "Approximating KL Divergence",
    2020. To join several micro-batches, weight each by its trained tokens.

    Args:
        trainer_logprobs: f[B, T].
        sampler_logprobs: f[B, T]. One of -inf makes the estimate infinite, as it says that this could not be drawn.
        loss_mask: bool[B, T].
        estimator: k1 or k3.

    Returns:
        f32[], detached; 0.0 if nothing is trained.

    Raises:
        PackError: shapes that differ, or another `estimator`.
    """
    log_ratio = _log_ratio(trainer_logprobs, sampler_logprobs, loss_mask)
    if estimator == "k1":
        # Ratios of infinity and of 0 have no sum; that the sampler could not draw what it drew is what matters.
        total = torch.where((log_ratio == math.inf).any(), -math.inf, -log_ratio.sum())
    elif estimator == "k3":
        # expm1(d) - d: with exp(d) - 1 - d, float32 would round a d below 1e-4 away.
        total = torch.where(log_ratio == math.inf, math.inf, torch.expm1(log_ratio) - log_ratio).sum()
    else:
        raise PackError(f"estimator is {estimator!r}; allowed: k1, k3")
    return total / loss_mask.sum().clamp(min=1)


def _log_ratio(trainer: torch.Tensor, sampler: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """f32[B, T]: trainer - sampler, inf where both are -inf, and 0.0 where the loss mask is off."""
    if not trainer.shape == sampler.shape == loss_mask.shape or trainer.ndim != 2 or loss_mask.dtype != torch.bool:
        raise PackError(
            f"trainer_logprobs {tuple(trainer.shape)}, sampler_logprobs {tuple(sampler.shape)}, loss_mask"
            f" {tuple(loss_mask.shape)} of {loss_mask.dtype}; allowed: all [B, T], and a mask of torch.bool"
        )
    ours, theirs = trainer.detach().float(), sampler.detach().float()
    ratio = torch.where((ours == -math.inf) & (theirs == -math.inf), math.inf, ours - theirs)
    return torch.where(loss_mask, ratio, 0.0)


def _sum_by_sequence(log_ratio: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Each sequence's sum, in the place of each of its tokens. In float64: a sum of thousands goes through exp."""
    shape = None if cu_seqlens is None else tuple(cu_seqlens.shape)
    if cu_seqlens is None or log_ratio.shape[0] != 1 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise PackError(
            f'level="sequence" with cu_seqlens of shape {shape} and logprobs of shape {tuple(log_ratio.shape)};'
            " allowed: [n + 1] and [1, T]"
        )
    segments = segment_indices(cu_seqlens.to(log_ratio.device), log_ratio.shape[1])
    sums = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float64, device=log_ratio.device)
    # Lowest stands for -inf, whose exp it has: inf and -inf in one sequence would give NaN, and inf is to win.
    sums.index_add_(0, segments, log_ratio[0].double().clamp(min=torch.finfo(torch.float32).min))
    return sums[segments].float()[None]
