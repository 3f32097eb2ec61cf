"""A sample with contradictory fields cannot be created."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollbus.trainer import PackError
from tests.trainer.builders import rows_of, sample_of

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"token_ids": [1, 2, 3]}, "token_ids is list; allowed: a numpy array of int32"),
    "int64": ({"token_ids": np.arange(6)}, "token_ids is int64 of shape (6,)"),
    "negative": ({"token_ids": np.array([0, 1, -1, 3, 4, 5], np.int32)}, "token_ids[2] is -1"),
    "mask length": ({"loss_mask": np.zeros(5, np.bool_)}, "loss_mask has 5 entries for 6 tokens"),
    "float64": ({"logprobs": np.zeros(6)}, "logprobs is float64"),
    "nan": ({"logprobs": np.array([0, 0, np.nan, 0, 0, 0], np.float32)}, "logprobs[2] is nan"),
    "unversioned": ({"weight_versions": np.full(6, -1, np.int32)}, "weight_versions[1] is -1"),
    "first token": ({"loss_mask": np.ones(6, np.bool_)}, "loss_mask is on at position 0"),
    "signed rows": (
        {"routed_experts": rows_of(5).astype(np.int16)},
        "routed_experts is int16 of shape (5, 2, 3)",
    ),
    "flat rows": ({"routed_experts": rows_of(5)[:, 0]}, "routed_experts is uint8 of shape (5, 3)"),
    "row too many": ({"routed_experts": rows_of(6)}, "6 rows for 6 tokens from start 0; allowed: S - 1 - start = 5"),
    "row too few": ({"routed_experts": rows_of(4)}, "has 4 rows for 6 tokens"),
    "late start": ({"routed_experts": rows_of(0), "start": 6}, "start is 6 of 6 tokens"),
    "advantages": ({"advantage": np.zeros(5, np.float32)}, "advantage has 5 entries for 6 tokens"),
    "a list of advantages": ({"advantage": [0.5] * 6}, "advantage is list; allowed: a number, or a numpy array of"),
    "no advantage": ({"advantage": None}, "advantage is NoneType"),
    "a tensor": ({"advantage": torch.tensor(0.5)}, "advantage is Tensor of torch.float32 of shape ()"),
    "beyond float32": ({"advantage": 1e39}, "advantage is 1e+39; allowed: finite numbers that float32 has"),
    "listed rows": ({"routed_experts": [[[1]]] * 5}, "routed_experts is list; allowed: a numpy array of uint8 or"),
    "torch rows": (
        {"routed_experts": torch.zeros(5, 2, 3, dtype=torch.uint16)},
        "routed_experts is Tensor of torch.uint16 of shape (5, 2, 3); allowed: a numpy array of uint8 or uint16",
    ),
    "infinite": ({"advantage": float("inf")}, "advantage is inf"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_fields_are_named(wrong: str) -> None:
    """Each contradiction is an error that names the field, the position or size, and the allowed values."""
    fields, message = WRONG[wrong]

    with pytest.raises(PackError) as caught:
        sample_of(6, **fields)

    assert message in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_a_start_is_an_integer() -> None:
    """A `start` of type float is rejected, not rounded."""
    with pytest.raises(PackError, match="start is of type float; allowed: an integer, 0 and above"):
        replace(sample_of(6), start=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("advantage", [1, True, np.float32(0.5), np.int64(-1)])
def test_an_advantage_is_any_number(advantage: Any) -> None:
    """An advantage may be a Python or numpy number."""
    assert sample_of(6, advantage=advantage).advantage == advantage


def test_logprobs_may_be_nan_where_the_loss_mask_is_off() -> None:
    """Logprobs may be NaN where the loss mask is off."""
    logprobs = np.array([np.nan, np.nan, -1, -1, -1, -1], np.float32)

    assert len(sample_of(6, first=2, logprobs=logprobs)) == 6


def test_repr_has_sizes_only() -> None:
    """The repr of a sample shows its sizes, never its contents."""
    assert repr(sample_of(6, start=2, first=3)) == "<Sample tokens=6 trained=3 rows=3x2x3 start=2>"
    assert repr(sample_of(2, routed=None)) == "<Sample tokens=2 trained=1 rows=none start=0>"
