"""A checkpoint folder on the trainer's machine: its tensors, and the other files that anchors contain."""

import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ....schemas.errors import InvalidRequest
from ....schemas.manifest import MANIFEST, is_file_name
from ...objects.safetensors_header import BadSafetensors, StoredTensor, read_header
from .tensors import RawTensor, TensorKind

__all__ = ["Checkpoint", "FolderFile", "folder_tensors", "read_checkpoint_folder"]

MAX_FILE_BYTES: Final = 64 * 1024**2
"""Maximum size of a file besides the weights. Tokenizers have up to 30 MB. The publisher holds these files in
memory."""
MAX_FILES_BYTES: Final = 256 * 1024**2
"""Maximum total size of these files."""
MAX_FILES: Final = 1024
"""Maximum number of these files, equal to the limit of a manifest."""
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
"""Suffixes of files that contain weights in any format, or that list files with weights."""


class FolderFile(NamedTuple):
    """A file besides the weights."""

    data: bytes
    sha256: str


class Checkpoint(NamedTuple):
    """The content of a checkpoint folder without the weights."""

    kinds: dict[str, TensorKind]
    """Dtype and shape of each tensor, by name."""
    files: dict[str, FolderFile]
    """The other files, by name."""


def read_checkpoint_folder(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a folder's safetensors files, and its other files. This blocks.

    Raises:
        InvalidRequest: the folder has no tensors or a tensor in two files, or a file cannot be read, is too large, or
            has a name that no version can contain.
    """
    path = Path(folder)
    try:
        kinds: dict[str, TensorKind] = {}
        for file in _weight_files(path):
            for name, stored in _read_header(file).items():
                if name in kinds:
                    raise _bad_folder(path, f"has the tensor {name[:200]!r} in two files")
                kinds[name] = TensorKind(stored.dtype, stored.shape)
        return Checkpoint(kinds, _other_files(path))
    except OSError as error:
        raise _bad_folder(path, f"cannot be read: {error.strerror or error}") from error


def folder_tensors(folder: str | os.PathLike[str]) -> Iterator[tuple[str, RawTensor]]:
    """Yield the tensors of a folder's safetensors files. The files are mapped: only pages that are read use memory.

    Raises:
        InvalidRequest: as in `read_checkpoint_folder`.
    """
    for file in _weight_files(Path(folder)):
        try:
            tensors = _read_header(file)
            with file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _bad_folder(file, f"cannot be read: {error.strerror or error}") from error
        content = np.frombuffer(mapped, np.uint8)
        for name, stored in tensors.items():
            yield name, RawTensor(stored.dtype, stored.shape, content[stored.begin : stored.end])


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _bad_folder(folder, "has no safetensors files")
    return files


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as opened:
        try:
            return read_header(opened.fileno())
        except BadSafetensors as error:
            raise _bad_folder(file, str(error)) from error


def _other_files(folder: Path) -> dict[str, FolderFile]:
    """Read the files directly in the folder that contain no weights and are not hidden."""
    found: dict[str, FolderFile] = {}
    num_bytes = 0
    for file in sorted(folder.iterdir()):
        name = file.name
        if name.startswith(".") or name.endswith(_WEIGHTS) or name == MANIFEST or not file.is_file():
            continue
        if not is_file_name(name):
            # Workers would reject the manifest of every version.
            raise InvalidRequest(
                field="checkpoint",
                problem=f"{folder} has the file {name[:200]!r}, whose name no version can contain",
                allowed="ASCII letters, digits, '_', '.' and '-', without the prefix 'delta-'; or remove this file",
            )
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        num_bytes += len(data)
        if len(data) > MAX_FILE_BYTES or num_bytes > MAX_FILES_BYTES or len(found) == MAX_FILES:
            raise _bad_folder(
                folder,
                f"has {name!r}, which exceeds the limits for files besides the weights (at most {MAX_FILES} files of"
                f" {MAX_FILE_BYTES} bytes each, {MAX_FILES_BYTES} bytes together)",
            )
        found[name] = FolderFile(data, hashlib.sha256(data).hexdigest())
    return found


def _bad_folder(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(field="checkpoint", problem=f"{path} {problem}", allowed="the folder of a whole checkpoint")
