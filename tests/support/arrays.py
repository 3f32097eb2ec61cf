"""Arrays in their wire format."""

from typing import Any

import numpy.typing as npt


def little_endian(array: npt.NDArray[Any], dtype: str) -> bytes:
    """Return the bytes of `array` as `dtype` ('<i4' or '<f4')."""
    return array.astype(dtype, copy=False).tobytes()
