"""What a safetensors file says of its tensors, without reading them: 8 bytes of length, then that much JSON.

Nothing in the file is believed: sizes are bounded before they are used, and the tensors must fill the rest of the file
exactly, each as large as its shape and dtype say. So a truncated file is noticed.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from ...schemas.manifest import DTYPE_BITS
from .roots import bad_source, open_regular

__all__ = ["FLOATS", "Tensor", "read_header"]

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound."""
MAX_DIMS: Final = 16
"""Of a tensor; models have up to 5."""
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


class _TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the names, dtypes and shapes of the tensors in a safetensors file, and check that all of them are there.

    Blocks.

    Raises:
        ControlError: `bad_source`: it cannot be read, is truncated, or is no safetensors file.
    """
    fd = open_regular(path)
    try:
        file_bytes = os.fstat(fd).st_size
        header = _read_json(fd, path, file_bytes)
    except OSError as error:
        raise bad_source(path, f"cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    return _check_entries(path, header, file_bytes)


def _read_json(fd: int, path: Path, file_bytes: int) -> bytes:
    """Read the header's JSON."""
    length = int.from_bytes(_read_exactly(fd, 8), "little")
    if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise bad_source(path, f"is truncated or no safetensors file: {file_bytes} bytes, with a header of {length}")
    header = _read_exactly(fd, length)
    if len(header) < length:
        raise bad_source(path, "became shorter while it was read")
    return header


def _read_exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes; fewer at the end of the file."""
    read = bytearray()
    while len(read) < size and (piece := os.read(fd, min(size - len(read), 1 << 20))):
        read += piece
    return bytes(read)


def _check_entries(path: Path, header: bytes, file_bytes: int) -> dict[str, Tensor]:
    """Decode the header; the tensors must lie one behind the other, from its end to the end of the file."""
    try:
        raws = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raws.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_TensorEntry) for name, raw in raws.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_source(path, f"is no safetensors file: its header does not decode: {error}") from error
    data_bytes = file_bytes - 8 - len(header)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        shown = f"the tensor {name[:200]!r}"
        if entry.dtype not in DTYPE_BITS:
            raise bad_source(path, f"has {shown} of the unknown dtype {entry.dtype[:40]!r}")
        begin, previous_end, end = entry.data_offsets[0], end, entry.data_offsets[1]
        bits = math.prod(entry.shape) * DTYPE_BITS[entry.dtype]
        if begin != previous_end or (end - begin) * 8 != bits:
            raise bad_source(
                path,
                f"has {shown} at bytes {begin} to {end}; expected: from {previous_end} on, and {bits / 8:g} bytes for "
                f"{entry.dtype}{list(entry.shape)}",
            )
        if end > data_bytes:
            raise bad_source(path, f"is truncated: {shown} ends at byte {end} of the data, and there are {data_bytes}")
    if end != data_bytes:
        raise bad_source(path, f"has {data_bytes} bytes of data; its tensors are {end}")
    data_begin = 8 + len(header)
    return {
        name: Tensor(entry.dtype, entry.shape, path, data_begin + entry.data_offsets[0])
        for name, entry in entries.items()
    }
