"""Tokens of old weights are masked or dropped exactly when their lag exceeds the maximum."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollbus.trainer import (
    PackError,
    Sample,
    drop_stale,
    group_advantages,
    has_signal,
    importance_weights,
    mask_stale,
    pack,
    sampler_kl,
    segment_indices,
)
from tests.trainer.models import sample_of


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


# Advantages of answers, and importance weights of their tokens.


TRAINER = torch.tensor([[-1.0, -0.5, -2.0, math.nan, -3.0]])
SAMPLER = torch.tensor([[-1.0, -2.5, -1.0, -1.0, -3.5]])
MASK = torch.tensor([[True, True, True, False, True]])
RATIOS = [1.0, math.exp(2.0), math.exp(-1.0), 0.0, math.exp(0.5)]


@pytest.mark.parametrize("cap", [1.0, 2.0, math.inf])
def test_token_weights_are_capped_ratios_and_0_where_the_mask_is_off(cap: float) -> None:
    """A token's weight is min(exp(trainer - sampler), cap), and 0 where the mask is off, even for NaN."""
    weights = importance_weights(TRAINER, SAMPLER, MASK, cap=cap)

    assert weights[0].tolist() == pytest.approx([min(ratio, cap) for ratio in RATIOS])


def test_sequence_weights_are_products_of_ratios_that_are_capped_once() -> None:
    """A sequence's weight is the product of its ratios, truncated once; each segment of a packed row is a sequence."""
    packed = importance_weights(
        TRAINER, SAMPLER, MASK, level="sequence", cap=4.0, cu_seqlens=torch.tensor([0, 1, 3, 5], dtype=torch.int32)
    )
    alone = importance_weights(
        TRAINER, SAMPLER, MASK, level="sequence", cap=100.0, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32)
    )

    assert packed[0].tolist() == pytest.approx([1.0, math.e, math.e, 0.0, math.exp(0.5)])
    assert alone[0].tolist() == pytest.approx([math.exp(1.5)] * 3 + [0.0] + [math.exp(1.5)])


def test_each_sample_of_a_micro_batch_has_its_own_sequence_weight() -> None:
    """Each sample of a batch has its own weight, and padding has weight 0."""
    given_samples = [sample_of(size, first=2) for size in (7, 4, 9)]
    (batch,) = pack(given_samples, max_tokens=32, pad_to_multiple_of=32)
    trainer = batch.sampler_logprobs - 0.01 * torch.arange(32) * batch.loss_mask

    weights = importance_weights(
        trainer, batch.sampler_logprobs, batch.loss_mask, level="sequence", cu_seqlens=batch.cu_seqlens
    )

    for index in range(3):
        here = batch.sample_indices == index
        there = here & batch.loss_mask
        ratio = float((trainer - batch.sampler_logprobs)[there].sum().exp())
        assert weights[there].tolist() == pytest.approx([ratio] * int(there.sum()))
    assert not weights[~batch.loss_mask].any()


def test_each_position_belongs_to_the_segment_whose_bounds_contain_the_position() -> None:
    """Each position belongs to the segment whose bounds contain it."""
    assert segment_indices(torch.tensor([0, 2, 3, 6]), 6).tolist() == [0, 0, 1, 2, 2, 2]
    assert segment_indices(torch.tensor([0, 4]), 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("trainer_says", [-9.0, -math.inf])
def test_a_sampler_logprob_of_minus_infinity_gives_the_weight_cap(trainer_says: float) -> None:
    """A sampler logprob of -inf gives the weight `cap` at both levels, and an infinite KL instead of NaN."""
    sampler, mask = torch.tensor([[-1.0, -math.inf]]), torch.tensor([[True, True]])
    trainer = torch.tensor([[-1.0, trainer_says]])
    whole = torch.tensor([0, 2])

    assert importance_weights(trainer, sampler, mask).tolist() == [[1.0, 2.0]]
    assert importance_weights(trainer, sampler, mask, level="sequence", cu_seqlens=whole).tolist() == [[2.0, 2.0]]
    assert sampler_kl(trainer, sampler, mask, estimator="k1").item() == -math.inf
    assert sampler_kl(trainer, sampler, mask).item() == math.inf


def test_minus_infinity_in_sampler_and_trainer_gives_the_sequence_weight_cap() -> None:
    """A sampler's -inf gives its sequence the weight `cap` and an infinite KL.

    A trainer's -inf alone gives weight 0, and a NaN stays visible.
    """
    sampler = torch.tensor([[-math.inf, -1.0, -1.0, -1.0, -math.inf]])
    trainer = torch.tensor([[-1.0, -math.inf, -math.inf, -1.0, math.nan]])
    mask, bounds = torch.ones(1, 5, dtype=torch.bool), torch.tensor([0, 2, 4, 5])

    by_token = importance_weights(trainer, sampler, mask)
    by_sequence = importance_weights(trainer, sampler, mask, level="sequence", cu_seqlens=bounds)

    assert by_token[0, :4].tolist() == [2.0, 0.0, 0.0, 1.0]
    assert by_sequence[0, :4].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert by_token[0, 4].isnan()
    assert by_sequence[0, 4].isnan()
    assert sampler_kl(trainer[:, :4], sampler[:, :4], mask[:, :4], estimator="k1").item() == -math.inf
    assert sampler_kl(trainer[:, :4], sampler[:, :4], mask[:, :4]).item() == math.inf


def test_no_gradient_flows_through_weights() -> None:
    """Importance weights and KL estimates carry no gradient."""
    trainer = SAMPLER.clone().requires_grad_()

    assert not importance_weights(trainer, SAMPLER, MASK).requires_grad
    assert not sampler_kl(trainer, SAMPLER, MASK).requires_grad


def test_low_precision_is_computed_in_float32() -> None:
    """The difference of two bfloat16 logprobs is computed in float32."""
    trainer, sampler = torch.tensor([[-100.0]], dtype=torch.bfloat16), torch.tensor([[-100.125]])

    assert importance_weights(trainer, sampler, torch.tensor([[True]])).item() == pytest.approx(math.exp(0.125))


def test_k1_and_k3_equal_their_formulas_over_the_trained_tokens() -> None:
    """Over the trained tokens k1 is the mean of -d, and k3 is the mean of exp(d) - 1 - d."""
    d = np.array([0.0, 2.0, -1.0, 0.5])

    assert sampler_kl(TRAINER, SAMPLER, MASK, estimator="k1").item() == pytest.approx(float(np.mean(-d)))
    assert sampler_kl(TRAINER, SAMPLER, MASK).item() == pytest.approx(float(np.mean(np.exp(d) - 1 - d)))
    assert sampler_kl(TRAINER, SAMPLER, torch.zeros_like(MASK)).item() == 0.0


def test_kl_estimates_the_kl() -> None:
    """For many samples k1 and k3 approach the exact KL(sampler || trainer), and k3 has less noise."""
    sampler = torch.log_softmax(torch.linspace(-1, 1, 8), 0)
    trainer = torch.log_softmax(torch.linspace(-0.6, 1.2, 8), 0)
    exact = float((sampler.exp() * (sampler - trainer)).sum())
    drawn = torch.multinomial(sampler.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, len(drawn), dtype=torch.bool)

    for estimator, tolerance in (("k1", 0.1), ("k3", 0.02)):
        found = sampler_kl(trainer[drawn][None], sampler[drawn][None], mask, estimator=estimator)  # type: ignore[arg-type]
        assert found.item() == pytest.approx(exact, rel=tolerance)


def test_small_kl_is_not_rounded_away() -> None:
    """In float32 a logprob difference of 1e-4, as between bfloat16 kernels, gives the correct KL of 5e-9."""
    d = torch.full((1, 4), 1e-4)

    assert sampler_kl(d, torch.zeros(1, 4), d > 0).item() == pytest.approx(5e-9, rel=0.05)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "cap": ({"cap": 0.0}, "cap is 0.0; allowed: above 0"),
    "level": ({"level": "turn"}, "level is 'turn'; allowed: token, sequence"),
    "shape": ({"sampler_logprobs": SAMPLER[0]}, "sampler_logprobs (5,)"),
    "mask": ({"loss_mask": MASK.float()}, "of torch.float32; allowed: all [B, T], and a mask of torch.bool"),
    "cu_seqlens": ({"level": "sequence", "cu_seqlens": torch.tensor([0])}, "cu_seqlens of shape (1,)"),
    "no cu_seqlens": ({"level": "sequence"}, 'level="sequence" with cu_seqlens of shape None and logprobs of'),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named_of_importance(wrong: str) -> None:
    """Shapes that would broadcast incorrectly and unknown option values are errors."""
    arguments, message = WRONG[wrong]
    right = {"trainer_logprobs": TRAINER, "sampler_logprobs": SAMPLER, "loss_mask": MASK}

    with pytest.raises(PackError) as caught:
        importance_weights(**{**right, **arguments})

    assert message in str(caught.value)
    with pytest.raises(PackError, match="estimator is 'k2'; allowed: k1, k3"):
        sampler_kl(TRAINER, SAMPLER, MASK, estimator="k2")  # type: ignore[arg-type]


GROUPS = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.integers(-40, 40).map(float))
"""Groups of rewards that differ by at least 1 or not at all."""


def test_by_std_is_the_formula_of_grpo() -> None:
    """An advantage by std is the reward minus the mean, divided by the population standard deviation, as in GRPO."""
    rewards = [0.0, 1.0, 1.0, 0.5]
    expected = torch.tensor(rewards, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.std(correction=0) + 1e-6)

    found = group_advantages(rewards)

    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_by_mean_and_leave_one_out_subtract_a_mean_of_rewards() -> None:
    """With `by="mean"` the mean of the group is subtracted, with `by="leave_one_out"` the mean of the other rewards."""
    np.testing.assert_array_equal(group_advantages([1, 0, 0, 0], by="mean"), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 0], by="leave_one_out"), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6
    )


@given(rewards=GROUPS, by=st.sampled_from(["std", "mean", "leave_one_out"]))
def test_the_advantages_of_a_group_depend_only_on_its_rewards(rewards: np.ndarray, by: str) -> None:
    """The advantages of a group depend only on its rewards, sum to zero, keep their order and ignore a constant."""
    found = group_advantages(rewards, by=by)  # type: ignore[arg-type]

    assert found.shape == rewards.shape
    for group, advantages in zip(rewards, found, strict=True):
        np.testing.assert_array_equal(advantages, group_advantages(group, by=by))  # type: ignore[arg-type]
        np.testing.assert_allclose(advantages, group_advantages(group + 3, by=by), atol=1e-5)  # type: ignore[arg-type]
        assert abs(float(advantages.sum(dtype=np.float64))) < 1e-4
        assert (np.argsort(advantages, kind="stable") == np.argsort(group, kind="stable")).all()
    np.testing.assert_array_equal(has_signal(rewards), (found != 0).any(axis=-1))


@pytest.mark.parametrize("by", ["std", "mean", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [3.3], [[0.1] * 3, [1e9] * 3]])
def test_groups_without_signal_are_exactly_zero(rewards: list[float], by: str) -> None:
    """The advantages of equal rewards are exactly zero, also if their mean is rounded or the group has one reward."""
    assert not group_advantages(rewards, by=by, eps=0.0).any()  # type: ignore[arg-type]
    assert not has_signal(rewards).any()


def test_has_signal_is_a_mask_over_groups() -> None:
    """`has_signal` is a mask over stacked groups, or a boolean for one group."""
    rewards = np.array([[0, 0, 0], [0, 1, 0], [1, 1, 1]])

    assert rewards[has_signal(rewards)].tolist() == [[0, 1, 0]]
    assert [group for group in ([1, 1], [0, 1, 2]) if has_signal(group)] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([[0, 1], [float("nan"), 1]], r"rewards\[1, 0\] is nan; allowed: finite numbers"),
        ([float("inf")], r"rewards\[0\] is inf"),
        ([], r"rewards have the shape \(0,\); allowed: \[n\] or \[G, n\]"),
        (1.0, r"rewards have the shape \(\)"),
        ([[1, 0], [1]], "groups differ in size"),
        (["good"], "rewards are not numbers"),
    ],
)
def test_invalid_rewards_are_rejected_with_their_position(rewards: object, message: str) -> None:
    """Both functions reject invalid rewards with an error that names the position, the value and the allowed values."""
    with pytest.raises(PackError, match=message):
        group_advantages(rewards)  # type: ignore[arg-type]
    with pytest.raises(PackError, match=message):
        has_signal(rewards)  # type: ignore[arg-type]


def test_an_unknown_by_or_a_negative_eps_is_rejected() -> None:
    """An unknown `by` or a negative `eps` is an error."""
    with pytest.raises(PackError, match="by is 'grpo'; allowed: std, mean, leave_one_out"):
        group_advantages([0, 1], by="grpo")  # type: ignore[arg-type]
    with pytest.raises(PackError, match=r"eps is -1.0; allowed"):
        group_advantages([0, 1], eps=-1.0)
