"""Tokens of old weights are masked or dropped exactly when their lag exceeds the maximum."""

import numpy as np
import pytest
import torch

from rollbus.trainer import PackError, Sample, drop_stale, mask_stale, pack
from tests.trainer.builders import sample_of


def versioned(*versions: int) -> Sample:
    """Return a sample with one prompt token and one sampled token for each version."""
    return sample_of(len(versions) + 1, weight_versions=np.array([-1, *versions], np.int32))


@pytest.mark.parametrize(("max_lag", "fresh"), [(0, [4]), (1, [3, 4]), (2, [2, 3, 4]), (9, [1, 2, 3, 4])])
def test_mask_stale_masks_tokens_whose_lag_exceeds_the_maximum(max_lag: int, fresh: list[int]) -> None:
    """Tokens of version - max_lag and later stay trained, and the original batch is unchanged."""
    (batch,) = pack([versioned(1, 2, 3, 4)], max_tokens=8, pad_to_multiple_of=8)

    masked = mask_stale(batch, version=4, max_lag=max_lag)

    assert masked.weight_versions[masked.loss_mask].tolist() == fresh
    assert batch.loss_mask.sum() == 4
    assert masked.input_ids is batch.input_ids


def test_stale_logprobs_are_finite() -> None:
    """The logprob of a masked token becomes 0.0, because the sampler's logprob may be -inf."""
    logprobs = np.array([0, -np.inf, -2], np.float32)
    sample = sample_of(3, logprobs=logprobs, weight_versions=np.array([-1, 1, 2], np.int32))
    (batch,) = pack([sample], max_tokens=2)

    assert mask_stale(batch, version=2, max_lag=0).sampler_logprobs.tolist() == [[0.0, -2.0]]
    assert batch.sampler_logprobs.tolist() == [[-np.inf, -2.0]]


def test_mask_stale_never_turns_a_mask_on() -> None:
    """Untrained tokens stay untrained, including prompts and padding, for any lag."""
    (batch,) = pack([sample_of(6, first=3)], max_tokens=8, pad_to_multiple_of=8)

    assert torch.equal(mask_stale(batch, version=0, max_lag=100).loss_mask, batch.loss_mask)


def test_drop_stale_decides_by_the_oldest_or_newest_trained_token() -> None:
    """The oldest or newest trained token decides about a sample; a sample without trained tokens is kept."""
    old, mixed, new = versioned(1, 1), versioned(3, 1), versioned(3, 4)
    untrained = sample_of(3, first=3)
    prompt_only_old = sample_of(
        3, weight_versions=np.array([-1, 0, 4], np.int32), loss_mask=np.array([False, False, True])
    )
    given_samples = [old, mixed, new, untrained, prompt_only_old]

    assert drop_stale(given_samples, version=4, max_lag=1) == [new, untrained, prompt_only_old]
    assert drop_stale(given_samples, version=4, max_lag=1, by="newest") == [mixed, new, untrained, prompt_only_old]
    assert drop_stale(given_samples, version=4, max_lag=3) == given_samples


def test_wrong_arguments_are_named() -> None:
    """A negative or fractional lag, a missing version and unknown options are errors."""
    with pytest.raises(PackError, match="max_lag is -1; allowed: an integer, 0 and above"):
        drop_stale([], version=1, max_lag=-1)
    with pytest.raises(PackError, match="version is of type NoneType; allowed: an integer"):
        drop_stale([], version=None, max_lag=1)
    with pytest.raises(PackError, match="max_lag is of type float; allowed: an integer, 0 and above"):
        mask_stale(pack([sample_of(3)], max_tokens=2)[0], version=1, max_lag=0.5)  # type: ignore[arg-type]
    with pytest.raises(PackError, match="samples is Sample; allowed: a list"):
        drop_stale(sample_of(3), version=1, max_lag=1)  # type: ignore[arg-type]
    with pytest.raises(PackError, match="by is 'mean'; allowed: oldest, newest"):
        drop_stale([], version=1, max_lag=1, by="mean")  # type: ignore[arg-type]
