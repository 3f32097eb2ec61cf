"""Conversion of routed experts to the dtypes of trainers: each id is kept, or it is an error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollbus.integrations.rows import TRAINER_DTYPES, check_row_dtype, convert_rows
from rollbus.schemas.errors import InvalidRequest


@given(
    arrays.arrays(np.uint16, st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 3))),
    st.sampled_from(TRAINER_DTYPES),
)
def test_each_id_is_kept_or_is_an_error(rows: np.ndarray, dtype: str) -> None:
    """A conversion keeps shape and each id, or it raises an error that names an id that does not fit."""
    highest = np.iinfo(dtype).max
    too_large = rows.size and int(rows.max()) > highest
    if too_large:
        with pytest.raises(InvalidRequest, match=f"have the id {rows.max()}; allowed: 0 to {highest}"):
            convert_rows(rows, dtype, None)
        return
    converted = convert_rows(rows, dtype, None)
    assert converted.dtype == np.dtype(dtype)
    assert converted.shape == rows.shape
    assert converted.flags.c_contiguous
    assert converted.astype(np.int64).tolist() == rows.tolist()


@pytest.mark.parametrize(("dtype", "fits", "too_many"), [("uint8", 255, 256), ("int16", 32767, 32768)])
def test_a_dtype_too_small_for_the_model_is_an_error_before_any_row(dtype: str, fits: int, too_many: int) -> None:
    """The model's number of experts decides, not the ids of one result."""
    check_row_dtype(dtype, fits)
    small = np.zeros((2, 1, 1), np.uint16)
    assert convert_rows(small, dtype, fits).dtype == np.dtype(dtype)
    for call in (lambda: check_row_dtype(dtype, too_many), lambda: convert_rows(small, dtype, too_many)):
        with pytest.raises(InvalidRequest, match=f"may have the id {too_many}, which does not fit {dtype}"):
            call()


@pytest.mark.parametrize(
    ("rows", "dtype", "largest_id", "message"),
    [
        (np.full((1, 1, 1), 8, np.uint8), "int16", 7, "have the id 8; allowed: 0 to 7, the ids of the model"),
        (np.full((1, 1, 1), -1, np.int32), "int16", None, "have the id -1; allowed: 0 to 32767"),
        (np.zeros((1, 1), np.uint8), "int16", 7, r"are uint8 of shape \(1, 1\)"),
        (np.zeros((1, 1, 1), np.float32), "int16", 7, "are float32 of shape"),
        ([[[1]]], "int16", 7, "are list; allowed: integers"),
        (np.zeros((1, 1, 1), np.uint8), "float16", 7, "have the dtype 'float16'; allowed: one of uint8"),
        (np.zeros((1, 1, 1), np.uint8), "int16", -1, "have the largest id -1"),
    ],
)
def test_wrong_rows_are_named(rows: np.ndarray, dtype: str, largest_id: int | None, message: str) -> None:
    """An error names the field, the problem and the allowed values."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        convert_rows(rows, dtype, largest_id)
    assert caught.value.field == "routed_experts"


def test_rows_of_the_right_dtype_are_not_copied() -> None:
    """Rows that have the dtype and are contiguous are returned without a copy; a strided view is copied."""
    rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    assert np.shares_memory(convert_rows(rows, "uint8", 255), rows)
    turned = convert_rows(rows.transpose(1, 0, 2), "uint8", 255)
    assert turned.flags.c_contiguous
    assert turned.tolist() == rows.transpose(1, 0, 2).tolist()
