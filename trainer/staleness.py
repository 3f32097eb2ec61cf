"""Tokens that old weights sampled: masked in a micro-batch, or their samples dropped before packing.

With a trainer at version V that allows a lag of N, what versions V - N and later sampled is fresh; the rest is stale.
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
    """The same micro-batch with the loss mask off for stale tokens, and 0.0 as their logprobs; the rest is shared.

    Args:
        batch: is not changed.
        version: of the trainer's weights.
        max_lag: 0 and above; how many versions behind a token may be.

    Raises:
        PackError: `version` or `max_lag` is not an integer, or `max_lag` is negative.
    """
    mask = batch.loss_mask & (batch.weight_versions >= _oldest(version, max_lag))
    return dataclasses.replace(batch, loss_mask=mask, sampler_logprobs=torch.where(mask, batch.sampler_logprobs, 0.0))


def drop_stale(
    samples: Iterable[Sample], *, version: int, max_lag: int, by: Literal["oldest", "newest"] = "oldest"
) -> list[Sample]:
    """The samples that are fresh, in order.

    Args:
        samples: one with nothing to train is never stale.
        version: of the trainer's weights.
        max_lag: 0 and above; how many versions behind a sample may be.
        by: `oldest`: a sample is as old as its oldest trained token, so what is kept has no stale token. `newest`:
            as its newest, so a sample is dropped only if all of it is stale; `mask_stale` masks the rest.

    Raises:
        PackError: `version` or `max_lag` is not an integer, `max_lag` is negative, `by` is another word, or something
            else than a sample is among them.
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
