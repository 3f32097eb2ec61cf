"""The header of a safetensors file: name, dtype, shape and position of each tensor, without its content."""

import math
import os
from pathlib import Path
from typing import Final, NamedTuple

from ...bus.objects import safetensors_header
from ...schemas.manifest import DTYPE_BITS
from .roots import bad_source, open_regular

__all__ = ["FLOATS", "Tensor", "read_header"]

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes that the tensors of an adapter may have."""


class Tensor(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: str
    """The dtype as in safetensors files: BF16, F32 ..."""
    shape: tuple[int, ...]
    file: Path
    """The file that contains the tensor."""
    begin: int = 0
    """The byte of the file at which the content begins."""

    @property
    def size(self) -> int:
        """Size of the content in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def __str__(self) -> str:
        """Dtype and shape, for error messages."""
        return f"{self.dtype}{list(self.shape)}"


def read_header(path: Path) -> dict[str, Tensor]:
    """Read names, dtypes and shapes of the tensors in a safetensors file, and check that the file is complete. Blocks.

    Raises:
        ControlError: `bad_source`: the file cannot be read, is truncated, or is no safetensors file.
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
