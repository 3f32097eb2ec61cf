"""The row rule of routed experts.

Row i of an array belongs to the absolute position `start + i` of prompt and generated tokens. A sequence of Lp prompt
and G >= 1 generated tokens has rows for positions 0 to Lp + G - 2. The last generated token has no row, because the
model has not processed it. Arrays are u1 or `<u2`, `[num_rows, num_layers, top_k]`, C-contiguous.
"""

from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from . import limits

Rows: TypeAlias = npt.NDArray[np.uint8 | np.uint16]
Int32s: TypeAlias = npt.NDArray[np.int32]
"""Token ids, weight versions and counts."""
Float32s: TypeAlias = npt.NDArray[np.float32]
"""Log probabilities and advantages."""
Uint8s: TypeAlias = npt.NDArray[np.uint8]
"""The content of a tensor."""
RowDtype = Literal["u1", "<u2"]
DTYPES: dict[str, np.dtype[Any]] = {"u1": np.dtype("u1"), "<u2": np.dtype("<u2")}
"""Dtypes of expert ids, by their names on the wire."""


def dtype_for(num_experts: int) -> RowDtype:
    """Return the dtype of a model's expert ids.

    It depends only on the number of experts, never on the ids of a result.
    """
    if not 1 <= num_experts <= limits.MAX_EXPERTS:
        raise ValueError(f"num_experts is {num_experts}; allowed: 1 to {limits.MAX_EXPERTS}")
    return "u1" if num_experts <= 256 else "<u2"


def dtype_of(rows: Rows) -> RowDtype:
    """Return the name on the wire of an array's dtype.

    Raises:
        ValueError: the array has another dtype.
    """
    for name in get_args(RowDtype):
        if rows.dtype == DTYPES[name]:
            return cast(RowDtype, name)
    raise ValueError(f"rows are {rows.dtype}; allowed: u1 or <u2")


def no_rows(num_layers: int, top_k: int, dtype: RowDtype) -> Rows:
    """Return an array without rows, with the shape and dtype of the model."""
    return np.empty((0, num_layers, top_k), DTYPES[dtype])


def expected_rows(prompt_len: int, start: int, num_tokens: int) -> int:
    """Return the number of rows for `num_tokens` generated tokens: Lp - start + G - 1, or 0 before the first token."""
    return max(prompt_len - start + num_tokens - 1, 0) if num_tokens else 0


def rows_as_wire(rows: npt.NDArray[Any], dtype: RowDtype) -> Rows:
    """Convert an engine's array to its dtype on the wire, C-contiguous. Copy only if necessary.

    Raises:
        ValueError: the array is not three-dimensional or not of integers, or an id does not fit the dtype.
    """
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError(f"routed experts are {rows.dtype} of shape {rows.shape}, not integers in three dimensions")
    wanted = DTYPES[dtype]
    if rows.dtype != wanted:
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) > np.iinfo(wanted).max):
            raise ValueError(f"expert ids {int(rows.min())} to {int(rows.max())} do not fit {dtype}")
        rows = rows.astype(wanted)
    return np.ascontiguousarray(rows)
