"""Comparison of two vLLM results: in float32 tokens and expert sets are equal, and logprobs agree to a tolerance."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rollbus import Generation

TOLERANCE = 1e-4
"""Tolerance of logprobs between different kernels and batches in float32."""


def expert_sets(rows: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Return rows with sorted experts in each layer, because vLLM does not order them."""
    assert rows is not None
    return np.sort(rows, axis=-1)


def assert_same(received: Generation, expected: Generation) -> None:
    """Assert that tokens and expert sets are equal and that logprobs agree to the tolerance."""
    np.testing.assert_array_equal(received.token_ids, expected.token_ids)
    assert received.logprobs is not None
    assert expected.logprobs is not None
    np.testing.assert_allclose(received.logprobs, expected.logprobs, atol=TOLERANCE)
    np.testing.assert_array_equal(expert_sets(received.routed_experts), expert_sets(expected.routed_experts))
