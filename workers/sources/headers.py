"""The tensors of a safetensors file that a worker may load, without reading them."""

import math
import os
from pathlib import Path
from typing import Final, NamedTuple

from ...bus.objects import safetensors_header
from ...schemas.manifest import DTYPE_BITS
from .roots import bad_source, open_regular

__all__ = ["FLOATS", "Tensor", "read_header"]

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of adapters."""


class Tensor(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: str
    """As safetensors write it: BF16, F32 ..."""
    shape: tuple[int, ...]
    file: Path
    """Where it lies."""
    begin: int = 0
    """The byte of the file at which its content begins."""

    @property
    def size(self) -> int:
        """Bytes of its content."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def __str__(self) -> str:
        """Dtype and shape, as error messages show them."""
        return f"{self.dtype}{list(self.shape)}"


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the names, dtypes and shapes of the tensors in a safetensors file, and check that all of them are there.

    Blocks.

    Raises:
        ControlError: `bad_source`: it cannot be read, is truncated, or is no safetensors file.
    """
    fd = open_regular(path)
    try:
        tensors = safetensors_header.read_header(fd)
    except safetensors_header.BadSafetensors as error:
        raise bad_source(path, error) from error
    except OSError as error:
        raise bad_source(path, f"cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    return {name: Tensor(stored.dtype, stored.shape, path, stored.begin) for name, stored in tensors.items()}
