"""Reads the header of a safetensors file without its tensors: 8 bytes of length, then JSON of that length.

No value in the file is trusted. Sizes are limited before they are used. The tensors must fill the rest of the file
exactly, each with the size of its shape and dtype, so a truncated file is detected.
"""

import math
import os
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from ...schemas.decoding import MALFORMED
from ...schemas.manifest import DTYPE_BITS

MAX_HEADER_BYTES: Final = 32 * 1024**2
"""Maximum bytes of a header: `MAX_TENSORS` tensors of 160 bytes each. The format allows 100 MB, which took 32 s and
1.3 GB to decode."""
MAX_TENSORS: Final = 200_000
"""Maximum tensors of a file, more than any model has: 61 layers of 384 experts with scales have 140,000."""
MAX_COLONS: Final = 5 * MAX_TENSORS
"""Maximum colons of a header. A tensor has four and metadata has few, so more cannot be a header of `MAX_TENSORS`. They
are counted before the JSON is decoded: each key costs memory."""
MAX_DIMS: Final = 16
"""Maximum dimensions of a tensor; models have up to 5."""
_LENGTH_BYTES: Final = 8


class BadSafetensors(ValueError):
    """The file is not a complete safetensors file. The message continues the file's name."""


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str
    """Dtype in the notation of safetensors: BF16, F32 ..."""
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte of the content in the file."""
    end: int
    """Offset after the last byte of the content."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def read_header(fd: int) -> dict[str, StoredTensor]:
    """Read the header of an open file from its start, and check that all of its tensors are present. Blocks.

    Returns:
        The tensors by name, in the order of their contents.

    Raises:
        BadSafetensors: the file is truncated, or is no safetensors file.
        OSError: the file cannot be read.
    """
    file_bytes = os.fstat(fd).st_size
    length = int.from_bytes(_read_exactly(fd, _LENGTH_BYTES), "little")
    if file_bytes < _LENGTH_BYTES or length > file_bytes - _LENGTH_BYTES:
        raise BadSafetensors(f"is truncated or no safetensors file: {file_bytes} bytes, with a header of {length}")
    if length > MAX_HEADER_BYTES:
        raise BadSafetensors(f"has a header of {length} bytes; allowed: {MAX_HEADER_BYTES}")
    header = _read_exactly(fd, length)
    if len(header) < length:
        raise BadSafetensors("became shorter while it was read")
    data_begin = _LENGTH_BYTES + length
    return _locate_tensors(_decode(header), data_begin, file_bytes - data_begin)


def _read_exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes; fewer at the end of the file."""
    read = bytearray()
    while len(read) < size and (piece := os.read(fd, min(size - len(read), 1 << 20))):
        read += piece
    return bytes(read)


def _decode(header: bytes) -> Mapping[str, _Entry]:
    if (num_colons := header.count(b":")) > MAX_COLONS:
        raise BadSafetensors(f"has a header with {num_colons} colons; allowed: {MAX_COLONS}, for {MAX_TENSORS} tensors")
    try:
        raws = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raws.pop("__metadata__", None)
        if len(raws) > MAX_TENSORS:
            raise BadSafetensors(f"has {len(raws)} tensors; allowed: {MAX_TENSORS} in one file")
        return {name: msgspec.json.decode(raw, type=_Entry) for name, raw in raws.items()}
    except MALFORMED as error:
        raise BadSafetensors(f"is no safetensors file: its header does not decode: {error}") from error


def _locate_tensors(entries: Mapping[str, _Entry], data_begin: int, data_bytes: int) -> dict[str, StoredTensor]:
    """Locate the tensors, which must be contiguous from the header's end to the end of the file."""
    located = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        shown = f"the tensor {name[:200]!r}"
        if entry.dtype not in DTYPE_BITS:
            raise BadSafetensors(f"has {shown} of the unknown dtype {entry.dtype[:40]!r}")
        begin, previous_end, end = entry.data_offsets[0], end, entry.data_offsets[1]
        bits = math.prod(entry.shape) * DTYPE_BITS[entry.dtype]
        if begin != previous_end or (end - begin) * 8 != bits:
            raise BadSafetensors(
                f"has {shown} at bytes {begin} to {end}; expected: from {previous_end} on, and {bits / 8:g} bytes for "
                f"{entry.dtype}{list(entry.shape)}"
            )
        if end > data_bytes:
            raise BadSafetensors(f"is truncated: {shown} ends at byte {end} of the data, and there are {data_bytes}")
        located[name] = StoredTensor(entry.dtype, entry.shape, data_begin + begin, data_begin + end)
    if end != data_bytes:
        raise BadSafetensors(f"has {data_bytes} bytes of data; its tensors have {end}")
    return located
