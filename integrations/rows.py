"""Converts routed experts to the dtype that a trainer expects. Each id fits the dtype, or it is an error."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..schemas.errors import InvalidRequest

TRAINER_DTYPES: Final = ("uint8", "uint16", "int8", "int16", "int32", "int64")
"""Dtypes of expert ids in trainers."""
FIELD: Final = "routed_experts"


def check_row_dtype(dtype: str, largest_id: int | None) -> None:
    """Reject a dtype that cannot hold each expert id of a model. Call this before the first request.

    Args:
        dtype: numpy name of the trainer's dtype, one of `TRAINER_DTYPES`.
        largest_id: the model's number of experts minus one. None: unknown, then only the name is checked.

    Raises:
        InvalidRequest: the dtype is unknown, or its range ends below `largest_id`.
    """
    if dtype not in TRAINER_DTYPES:
        raise InvalidRequest(
            field=FIELD, problem=f"have the dtype {dtype!r}", allowed=f"one of {', '.join(TRAINER_DTYPES)}"
        )
    if largest_id is None:
        return
    if largest_id < 0:
        raise InvalidRequest(field=FIELD, problem=f"have the largest id {largest_id}", allowed="0 and above")
    if largest_id > np.iinfo(dtype).max:
        raise InvalidRequest(
            field=FIELD,
            problem=f"may have the id {largest_id}, which does not fit {dtype}",
            allowed=f"0 to {np.iinfo(dtype).max}",
        )


def convert_rows(rows: Any, dtype: str, largest_id: int | None) -> npt.NDArray[Any]:
    """Return routed experts in a trainer's dtype, C-contiguous and of the same shape. Copy only if necessary.

    Args:
        rows: numpy array of integers [num_rows, num_layers, top_k].
        dtype: numpy name of the trainer's dtype, one of `TRAINER_DTYPES`.
        largest_id: the model's number of experts minus one. None: unknown, then each id must fit `dtype`.

    Raises:
        InvalidRequest: `rows` is not an array of integers in three dimensions, the dtype cannot hold the model's ids,
            or an id is negative, above `largest_id`, or outside the dtype. The error gives the id and the range.
    """
    check_row_dtype(dtype, largest_id)
    if not isinstance(rows, np.ndarray) or rows.ndim != 3 or rows.dtype.kind not in "iu":
        has = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidRequest(field=FIELD, problem=f"are {has}", allowed="integers [num_rows, num_layers, top_k]")
    highest = int(np.iinfo(dtype).max) if largest_id is None else largest_id
    if rows.size:
        for found in (int(rows.max()), int(rows.min())):
            if not 0 <= found <= highest:
                whose = f"the range of {dtype}" if largest_id is None else "the ids of the model"
                raise InvalidRequest(field=FIELD, problem=f"have the id {found}", allowed=f"0 to {highest}, {whose}")
    return np.ascontiguousarray(rows, np.dtype(dtype))
