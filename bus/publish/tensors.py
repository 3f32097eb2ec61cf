"""The tensors that a publisher compares: those that a trainer gives, of a checkpoint folder, and of the last version.

This module does not import torch: a torch tensor implies torch.
"""

import hashlib
import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.manifest import DTYPE_BITS, MANIFEST, Manifest, content_bytes, is_file_name, item_bytes
from ...schemas.rows import Uint8s
from ..objects.safetensors_header import MAX_DIMS, BadSafetensors, StoredTensor, read_header
from ..protocol.weights.tensors import INDEX

MAX_NAME_CHARS: Final = 1024
_DTYPES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}
"""Names of dtypes in torch, numpy and ml_dtypes, with their names in safetensors."""
_SLICES: Final = ("DTensor", "ShardedTensor")
"""Classes of torch that hold only a slice of a tensor on each rank."""
MAX_FILE_BYTES: Final = 64 * 1024**2
"""Maximum size of a file besides the weights. Tokenizers have up to 30 MB. The publisher holds these files in
memory."""
MAX_FILES_BYTES: Final = 256 * 1024**2
"""Maximum total size of these files."""
MAX_FILES: Final = 1024
"""Maximum number of these files, equal to the limit of a manifest."""
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
"""Suffixes of files that contain weights in any format, or that list files with weights."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes, for programs that have neither torch nor a numpy dtype for it."""

    dtype: str
    """Name of the dtype in safetensors, for example BF16 or F8_E4M3."""
    shape: tuple[int, ...]
    """Length of each dimension. Empty for a scalar."""
    data: bytes | bytearray | memoryview | Uint8s
    """The content, little-endian, in row-major order."""


class TensorKind(NamedTuple):
    """Dtype and shape. Only tensors of the same kind can be compared."""

    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return dtype and shape as in error messages."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def size(self) -> int:
        """Size of the content in bytes."""
        return content_bytes(self.dtype, self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in a delta. 1 if several elements share a byte."""
        return item_bytes(self.dtype)


class TensorContent(NamedTuple):
    """Kind and content of one tensor."""

    kind: TensorKind
    content: Uint8s
    """u1[size]. It may be the caller's own memory, which the caller may change later."""


def read_tensor(name: object, tensor: object) -> TensorContent:
    """Return a tensor's content. A tensor on another device is copied to host memory.

    Raises:
        InvalidRequest: the name or the tensor cannot be in a checkpoint, or the tensor is a slice.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not _is_name(name):
        allowed = f"a name of 1 to {MAX_NAME_CHARS} characters, as in the checkpoint"
        raise InvalidRequest("named_tensors", f"has the name {describe(name)}", allowed)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        found = _read_torch(name, tensor, torch)
    elif type(tensor).__name__ in _SLICES:
        raise _is_slice(name, tensor)
    elif isinstance(tensor, np.ndarray | np.generic):
        found = _read_numpy(name, np.asarray(tensor))
    elif isinstance(tensor, RawTensor):
        found = _read_raw(name, tensor)
    else:
        raise bad_tensor(name, f"is {describe(tensor)}", "a torch tensor, a numpy array or a rollbus.RawTensor")
    if len(found.kind.shape) > MAX_DIMS:
        raise bad_tensor(name, f"has {len(found.kind.shape)} dimensions", f"up to {MAX_DIMS}")
    return found


def _is_name(name: str) -> bool:
    """Return False for the reserved name in safetensors files, and for names that JSON cannot encode."""
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return name != "__metadata__"


def _read_torch(name: str, tensor: Any, torch: Any) -> TensorContent:
    if any(kind.__name__ in _SLICES for kind in type(tensor).__mro__):
        raise _is_slice(name, tensor)
    dtype = _dtype(name, str(tensor.dtype).removeprefix("torch."))
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise bad_tensor(name, "is a sparse, quantized or meta tensor", "a dense tensor")
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    shape = tuple(tensor.shape)
    if dtype == "F4":
        # Torch counts bytes, each of which contains two elements; safetensors counts elements.
        shape = (*shape[:-1], shape[-1] * 2)
    # A tensor with one element counts as contiguous for any stride.
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    content = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return TensorContent(TensorKind(dtype, shape), content)


def _read_numpy(name: str, array: npt.NDArray[Any]) -> TensorContent:
    dtype = _dtype(name, array.dtype.name)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return TensorContent(TensorKind(dtype, array.shape), content)


def _read_raw(name: str, tensor: RawTensor) -> TensorContent:
    if tensor.dtype not in DTYPE_BITS:
        raise bad_tensor(name, f"has the dtype {describe(tensor.dtype)}", f"one of {', '.join(DTYPE_BITS)}")
    shape: object = tensor.shape
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise bad_tensor(name, f"has the shape {describe(shape)}", "a tuple of integers of at least 0")
    kind = TensorKind(tensor.dtype, tensor.shape)
    try:
        content = np.frombuffer(tensor.data, np.uint8) if len(tensor.data) else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise bad_tensor(name, f"has data that is {describe(tensor.data)}", "a contiguous bytes-like object") from None
    if math.prod(kind.shape) * DTYPE_BITS[kind.dtype] != 8 * len(content):
        raise bad_tensor(name, f"has {len(content)} bytes", f"the number of bytes of {kind}")
    return TensorContent(kind, content)


def _dtype(name: str, dtype: str) -> str:
    if dtype not in _DTYPES:
        raise bad_tensor(name, f"has the dtype {dtype[:80]}", f"one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _is_slice(name: str, tensor: object) -> InvalidRequest:
    return bad_tensor(name, f"is a {type(tensor).__name__}, a slice on each rank", "a whole tensor; gather it first")


def bad_tensor(name: str, problem: str, allowed: str) -> InvalidRequest:
    """Return the error for one of the given tensors."""
    return InvalidRequest(f"named_tensors[{name[:200]!r}]", problem, allowed)


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
                "checkpoint",
                f"{folder} has the file {name[:200]!r}, whose name no version can contain",
                "ASCII letters, digits, '_', '.' and '-', without the prefix 'delta-'; or remove this file",
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
    return InvalidRequest("checkpoint", f"{path} {problem}", "the folder of a whole checkpoint")


@dataclass(slots=True)
class SnapshotTensor:
    """One tensor of a committed version."""

    kind: TensorKind
    file: str
    """File of the version that contains the tensor."""
    sha256: str
    content: Uint8s
    """u1[size]: content in the publisher's own memory."""


@dataclass(slots=True)
class Snapshot:
    """A committed version. It is empty until the first commit, when tensors and files are not known."""

    digest: str = ""
    """Digest of the content."""
    tensors: dict[str, SnapshotTensor] = field(default_factory=dict)
    """Tensors by name, in the manifest's order."""

    def __bool__(self) -> bool:
        """Return True if there is a version to compare with."""
        return bool(self.tensors)

    def layout(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each file with the names of its tensors."""
        files: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            files.setdefault(tensor.file, []).append(name)
        yield from files.items()


def fill(
    snapshot: Snapshot, manifest: Manifest, files: Mapping[str, FolderFile], folder: str | os.PathLike[str]
) -> None:
    """Read a folder's tensors into an empty snapshot of `manifest`. This blocks.

    Args:
        files: files besides the tensors in the next publication.

    Raises:
        InvalidRequest: a tensor differs from the manifest, or `files` differ from it. A delta contains no files, so
            they must be equal.
    """
    shown = f"{os.fspath(folder)}, and version {manifest.version} was published with"
    known = {name: sha256 for name, sha256 in manifest.files.items() if name != INDEX}
    if differing := sorted(known.items() ^ {(name, file.sha256) for name, file in files.items()}):
        raise _bad_base(f"{shown} another {differing[0][0]}")
    entries = {entry.name: entry for entry in manifest.tensors}
    tensors: dict[str, SnapshotTensor] = {}
    for name, tensor in folder_tensors(folder):
        kind, content = read_tensor(name, tensor)
        own = content.copy()
        entry = entries.get(name)
        if entry is None or name in tensors or hashlib.sha256(own.data).hexdigest() != entry.sha256:
            raise _bad_base(f"{shown} another {name[:200]}, or without it")
        if (entry.dtype, entry.shape) != (kind.dtype, kind.shape):
            raise _bad_base(f"{shown} another dtype or shape of {name[:200]}")
        tensors[name] = SnapshotTensor(kind, entry.file, entry.sha256, own)
    if missing := sorted(entries.keys() - tensors.keys()):
        raise _bad_base(f"{shown} {missing[0][:200]}, which the folder lacks")
    snapshot.tensors = {name: tensors[name] for name in entries}
    snapshot.digest = manifest.digest


def _bad_base(problem: str) -> InvalidRequest:
    return InvalidRequest("base", f"is {problem}", "the content of the last published version, or no base")
