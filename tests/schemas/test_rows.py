"""The row rule, and the dtype of expert ids on the wire."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas import limits
from rollbus.schemas.rows import DTYPES, RowDtype, dtype_for, expected_rows, rows_as_wire


@pytest.mark.proves("P14")
@pytest.mark.parametrize(("num_experts", "dtype"), [(1, "u1"), (256, "u1"), (257, "<u2"), (limits.MAX_EXPERTS, "<u2")])
def test_the_dtype_follows_the_number_of_experts(num_experts: int, dtype: str) -> None:
    """The dtype is u1 for up to 256 experts and <u2 above. It does not depend on the ids in a sample."""
    assert dtype_for(num_experts) == dtype
    assert num_experts - 1 <= np.iinfo(DTYPES[dtype]).max


@pytest.mark.parametrize("num_experts", [-1, 0, limits.MAX_EXPERTS + 1])
def test_impossible_numbers_of_experts_are_refused(num_experts: int) -> None:
    """A model has at least one expert, and at most as many as <u2 can number."""
    with pytest.raises(ValueError, match=f"num_experts is {num_experts}; allowed: 1 to 65536"):
        dtype_for(num_experts)


@pytest.mark.proves("P14")
@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 50))
def test_a_sequence_has_a_row_for_every_position_but_the_last(prompt_len: int, start: int, num_tokens: int) -> None:
    """The rule equals a simple count of the positions from start up to the last generated token, without that token."""
    start = min(start, prompt_len)
    positions = [position for position in range(prompt_len + num_tokens) if position >= start]

    assert expected_rows(prompt_len, start, num_tokens) == len(positions[:-1])


@pytest.mark.parametrize(("prompt_len", "start"), [(5, 0), (5, 5), (1, 0)])
def test_a_request_without_a_token_has_no_rows(prompt_len: int, start: int) -> None:
    """A request without a token, for example after an abort, has no rows."""
    assert expected_rows(prompt_len, start, 0) == 0


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
@pytest.mark.parametrize("given_dtype", ["u1", "i2", "<u2", ">u2", "i4", "i8"])
def test_rows_of_any_type_and_order_keep_their_ids(dtype: RowDtype, given_dtype: str) -> None:
    """Rows of any integer type, byte order and memory order keep their ids.

    They become C-contiguous rows of the model's dtype.
    """
    ids = np.arange(2 * 3 * 4).reshape(4, 3, 2).astype(given_dtype).transpose(2, 1, 0)
    rows = rows_as_wire(ids, dtype)

    assert rows.dtype == DTYPES[dtype]
    assert rows.flags.c_contiguous
    np.testing.assert_array_equal(rows, ids)


def test_rows_in_the_wire_format_are_not_copied() -> None:
    """Rows in the wire format are not copied."""
    rows = np.zeros((2, 3, 4), "u1")

    assert np.shares_memory(rows_as_wire(rows, "u1"), rows)


@pytest.mark.parametrize(
    ("rows", "dtype", "text"),
    [
        (np.full((1, 1, 1), 256), "u1", "expert ids 256 to 256 do not fit u1"),
        (np.full((1, 1, 1), -1), "u1", "expert ids -1 to -1 do not fit u1"),
        (np.full((1, 1, 1), 65_536), "<u2", "do not fit <u2"),
        (np.zeros((1, 1), "u1"), "u1", r"uint8 of shape \(1, 1\), not integers in three dimensions"),
        (np.zeros((1, 1, 1)), "u1", r"float64 of shape \(1, 1, 1\), not integers"),
        (np.zeros((1, 1, 1), bool), "u1", "bool of shape"),
    ],
)
def test_rows_are_never_narrowed_silently(rows: Any, dtype: RowDtype, text: str) -> None:
    """An id that does not fit the dtype is an error and never becomes another expert's id."""
    with pytest.raises(ValueError, match=text):
        rows_as_wire(rows, dtype)


@pytest.mark.parametrize("given_dtype", ["u1", "i4"])
def test_zero_rows_keep_the_shape_of_layers_and_top_k(given_dtype: str) -> None:
    """Zero rows keep the shape of layers and top-k."""
    assert rows_as_wire(np.zeros((0, 3, 2), given_dtype), "<u2").shape == (0, 3, 2)
