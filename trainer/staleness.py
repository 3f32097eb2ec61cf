"""Masks tokens of old weights in a micro-batch, or drops their samples before packing.

For a trainer at version V with a lag of N, tokens of versions V - N and later are fresh. All others are stale.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch

from .checks import check_integer
from .errors import PackError
from .packing import MicroBatch
from .sample import Sample, check_samples

__all__ = ["drop_stale", "mask_stale"]


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
