"""Reads the content of a tensor of any library as bytes. It does not import torch: a torch tensor implies torch."""

import math
import sys
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.checks import describe
from ....schemas.errors import InvalidRequest
from ....schemas.manifest import DTYPE_BITS, content_bytes, item_bytes

__all__ = ["RawTensor", "TensorContent", "TensorKind", "read_tensor"]

MAX_NAME_CHARS: Final = 1024
MAX_DIMS: Final = 16
"""Maximum number of dimensions of a tensor; models have up to 5."""
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


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes, for programs that have neither torch nor a numpy dtype for it."""

    dtype: str
    """Name of the dtype in safetensors, for example BF16 or F8_E4M3."""
    shape: tuple[int, ...]
    """Length of each dimension. Empty for a scalar."""
    data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]
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
    content: npt.NDArray[np.uint8]
    """u1[size]. It may be the caller's own memory, which the caller may change later."""


def read_tensor(name: object, tensor: object) -> TensorContent:
    """Return a tensor's content. A tensor on another device is copied to host memory.

    Raises:
        InvalidRequest: the name or the tensor cannot be in a checkpoint, or the tensor is a slice.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not _is_name(name):
        allowed = f"a name of 1 to {MAX_NAME_CHARS} characters, as in the checkpoint"
        raise InvalidRequest(field="named_tensors", problem=f"has the name {describe(name)}", allowed=allowed)
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
        raise _bad(name, f"is {describe(tensor)}", "a torch tensor, a numpy array or a rollbus.RawTensor")
    if len(found.kind.shape) > MAX_DIMS:
        raise _bad(name, f"has {len(found.kind.shape)} dimensions", f"up to {MAX_DIMS}")
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
        raise _bad(name, "is a sparse, quantized or meta tensor", "a dense tensor")
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
        raise _bad(name, f"has the dtype {describe(tensor.dtype)}", f"one of {', '.join(DTYPE_BITS)}")
    shape: object = tensor.shape
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise _bad(name, f"has the shape {describe(shape)}", "a tuple of integers of at least 0")
    kind = TensorKind(tensor.dtype, tensor.shape)
    try:
        content = np.frombuffer(tensor.data, np.uint8) if len(tensor.data) else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise _bad(name, f"has data that is {describe(tensor.data)}", "a contiguous bytes-like object") from None
    if math.prod(kind.shape) * DTYPE_BITS[kind.dtype] != 8 * len(content):
        raise _bad(name, f"has {len(content)} bytes", f"the number of bytes of {kind}")
    return TensorContent(kind, content)


def _dtype(name: str, dtype: str) -> str:
    if dtype not in _DTYPES:
        raise _bad(name, f"has the dtype {dtype[:80]}", f"one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _is_slice(name: str, tensor: object) -> InvalidRequest:
    return _bad(name, f"is a {type(tensor).__name__}, a slice on each rank", "a whole tensor; gather it first")


def _bad(name: str, problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(field=f"named_tensors[{name[:200]!r}]", problem=problem, allowed=allowed)
