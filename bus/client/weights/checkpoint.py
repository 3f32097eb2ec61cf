"""The folder of a checkpoint on the trainer's machine: its tensors, and the other files that go into anchors."""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ....schemas.errors import InvalidRequest
from ....schemas.manifest import DTYPE_BITS, MANIFEST
from .tensors import RawTensor, TensorKind

__all__ = ["Checkpoint", "FolderFile", "folder_tensors", "read_checkpoint_folder"]

MAX_HEADER_BYTES: Final = 100_000_000
"""Of a safetensors file: the format's own bound."""
MAX_FILE_BYTES: Final = 64 * 1024**2
"""Of a file beside the weights: tokenizers have up to 30 MB. They are held in memory."""
MAX_FILES_BYTES: Final = 256 * 1024**2
"""Of all of them."""
MAX_FILES: Final = 1024
"""As manifests have at most."""
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
"""How names of files end that hold weights, in any format, or list such files."""


class FolderFile(NamedTuple):
    """A file beside the weights."""

    data: bytes
    sha256: str


class Checkpoint(NamedTuple):
    """What a folder says of a model."""

    kinds: dict[str, TensorKind]
    """Of each tensor, by name."""
    files: dict[str, FolderFile]
    """The other files, by name."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_checkpoint_folder(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a folder's safetensors files, and its other files. Blocks.

    Raises:
        InvalidRequest: there are no tensors, one is there twice, or a file cannot be read or is too large.
    """
    path = Path(folder)
    try:
        kinds: dict[str, TensorKind] = {}
        for file in _weight_files(path):
            for name, entry in _read_header(file)[0].items():
                if name in kinds:
                    raise _bad(path, f"has the tensor {name[:200]!r} in two files")
                kinds[name] = TensorKind(entry.dtype, entry.shape)
        return Checkpoint(kinds, _other_files(path))
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror or error}") from error


def folder_tensors(folder: str | os.PathLike[str]) -> Iterator[tuple[str, RawTensor]]:
    """Yield the tensors of a folder's safetensors files, as they lie on the disk: only pages that are read take memory.

    Raises:
        InvalidRequest: as in `read_checkpoint_folder`.
    """
    for file in _weight_files(Path(folder)):
        try:
            entries, start = _read_header(file)
            with file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _bad(file, f"cannot be read: {error.strerror or error}") from error
        content = np.frombuffer(mapped, np.uint8)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            yield name, RawTensor(entry.dtype, entry.shape, content[start + begin : start + end])


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _bad(folder, "has no safetensors files")
    return files


def _read_header(file: Path) -> tuple[Mapping[str, _Entry], int]:
    """Read the entries of a safetensors file, and where contents begin."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise _bad(file, f"is no safetensors file, or was truncated: {size} bytes, with a header of {length}")
        data = opened.read(length)
    try:
        raws = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        raws.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in raws.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(file, f"is no safetensors file: {error}") from error
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        is_known = entry.dtype in DTYPE_BITS and all(length >= 0 for length in entry.shape)
        is_within = is_known and 0 <= begin <= end <= size - 8 - length
        if not is_within or TensorKind(entry.dtype, entry.shape).size != end - begin:
            raise _bad(file, f"has the tensor {name[:200]!r} with an unknown dtype, or outside of the file")
    return entries, 8 + length


def _other_files(folder: Path) -> dict[str, FolderFile]:
    """Read what is no weights and not hidden, directly in the folder."""
    found: dict[str, FolderFile] = {}
    num_bytes = 0
    for file in sorted(folder.iterdir()):
        name = file.name
        if name.startswith(".") or name.endswith(_WEIGHTS) or name == MANIFEST or not file.is_file():
            continue
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        num_bytes += len(data)
        if len(data) > MAX_FILE_BYTES or num_bytes > MAX_FILES_BYTES or len(found) == MAX_FILES:
            raise _bad(
                folder,
                f"has {name!r}, with which its files beside the weights are too many or too large (allowed: {MAX_FILES}"
                f" of up to {MAX_FILE_BYTES} bytes, {MAX_FILES_BYTES} in all)",
            )
        found[name] = FolderFile(data, hashlib.sha256(data).hexdigest())
    return found


def _bad(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(field="checkpoint", problem=f"{path} {problem}", allowed="the folder of a whole checkpoint")
