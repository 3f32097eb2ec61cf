"""Errors between the results of rollbus and a training step, and the checks of numbers and arrays that raise them.

RollbusError (rollbus.schemas.errors)
├── StitchError          turns, attempts or pieces of routed experts do not form one sequence
├── PackError            a sample contradicts itself, or samples cannot become micro-batches
├── ReplayError          a model cannot use the given routed experts
└── CheckpointMismatch   a model's tensors differ from those of its checkpoint

Errors give the place, the problem and the allowed values.
"""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schemas.errors import RollbusError
from ..schemas.rows import DTYPES


class StitchError(RollbusError, ValueError):
    """Pieces do not form one sequence: they have a gap, contradict each other, or have another model's layout."""


class PackError(RollbusError, ValueError):
    """A sample contradicts itself, or samples cannot become micro-batches."""


class ReplayError(RollbusError):
    """A model cannot use the given routed experts, or is used in a way that would silently choose other experts."""


class CheckpointMismatch(RollbusError):
    """A model's tensors differ from those of its checkpoint, or are only slices."""


Refusal = type[PackError] | type[StitchError]


def check_integer(refusal: Refusal, name: str, value: Any, lowest: int | None = None) -> int:
    """Return an integer of any library that is at least `lowest`. Reject values that would need rounding."""
    allowed = "an integer" if lowest is None else f"an integer, {lowest} and above"
    try:
        number = operator.index(value)
    except TypeError:
        raise refusal(f"{name} is of type {type(value).__name__}; allowed: {allowed}") from None
    if lowest is not None and number < lowest:
        raise refusal(f"{name} is {number}; allowed: {allowed}")
    return number


def check_vector(refusal: Refusal, name: str, array: object, dtype: type[np.generic], size: int | None = None) -> None:
    """Reject anything but a numpy array of this dtype in one dimension, with one entry for each of `size` tokens."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise refusal(f"{name} is {describe(array)}; allowed: a numpy array of {np.dtype(dtype)} in one dimension")
    if size is not None and len(array) != size:
        raise refusal(f"{name} has {len(array)} entries for {size} tokens; allowed: one for each token")


def check_entries(
    refusal: Refusal, name: str, array: npt.NDArray[Any], good: npt.NDArray[np.bool_], allowed: str
) -> None:
    """Reject an array with an entry that is not good. The error gives the first such entry."""
    if not good.all():
        index = int(good.argmin())
        raise refusal(f"{name}[{index}] is {array[index]}; allowed: {allowed}")


def check_rows(refusal: Refusal, name: str, rows: object) -> None:
    """Reject anything but a numpy array of expert ids in three dimensions."""
    if not isinstance(rows, np.ndarray) or rows.dtype not in DTYPES.values() or rows.ndim != 3:
        raise refusal(
            f"{name} is {describe(rows)}; allowed: a numpy array of uint8 or uint16, of shape [rows, layers, top_k]"
        )


def describe(value: object) -> str:
    """Describe a value without its contents: `int64 of shape (6, 1)`, `list`, `Tensor of torch.uint16 ...`."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return type(value).__name__
    foreign = "" if isinstance(value, np.ndarray) else f"{type(value).__name__} of "
    return f"{foreign}{value.dtype} of shape {tuple(value.shape)}"
