"""The properties of group advantages, and groups without signal."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollbus.trainer import PackError, group_advantages, has_signal

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
