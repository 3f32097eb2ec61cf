"""Measures and corrects the difference between the sampler's and the trainer's probability of sampled tokens.

The probabilities differ for three reasons: the weights have changed, the kernels round differently, and in a mixture of
experts, a router that rounds differently chooses other experts. Router replay removes the third reason.

All functions take aligned log probabilities, like those of `MicroBatch`. They read only positions where the loss mask
is on, so other values, including NaN, have no effect. They compute in float32 and do not wait for the device.
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
