"""`read_tensor` returns the bytes of a tensor of any library, and rejects values that are no whole tensor.

The error names the tensor.
"""

from typing import Any

import numpy as np
import pytest
import torch

from rollbus.bus.publish.tensors import RawTensor, TensorKind, read_tensor
from rollbus.schemas.errors import InvalidRequest


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bool, "BOOL"), (torch.uint8, "U8"), (torch.int8, "I8"), (torch.int16, "I16"), (torch.uint16, "U16"),
        (torch.int32, "I32"), (torch.int64, "I64"), (torch.float16, "F16"), (torch.bfloat16, "BF16"),
        (torch.float32, "F32"), (torch.float64, "F64"), (torch.complex64, "C64"), (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"), (torch.float8_e8m0fnu, "F8_E8M0"),
    ],
)  # fmt: skip
def test_torch_tensors_of_any_dtype_are_bytes(dtype: torch.dtype, name: str) -> None:
    """Torch tensors of any dtype are read as their bytes."""
    tensor = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype)
    kind, content = read_tensor("w", tensor)
    assert kind == TensorKind(name, (2, 3))
    expected = torch.empty(len(content), dtype=torch.uint8)
    expected.copy_(torch.from_numpy(content.copy()))
    assert torch.equal(expected.view(dtype).reshape(2, 3).view(torch.uint8), tensor.view(torch.uint8))
    assert kind.size == len(content)


def test_parts_of_a_byte_are_counted_as_safetensors_do() -> None:
    """The shape of types below one byte counts elements as safetensors does."""
    tensor = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    kind, content = read_tensor("w", tensor)
    assert kind == TensorKind("F4", (2, 8))
    assert content.tobytes() == bytes(range(8))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    """Scalars and empty tensors are read with their shape."""
    for tensor in (torch.ones(shape, dtype=torch.bfloat16), np.ones(shape, np.float32)):
        kind, content = read_tensor("w", tensor)
        assert kind.shape == shape
        assert len(content) == kind.size


def test_a_view_is_read_in_its_own_order() -> None:
    """A view is read in its own element order."""
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3).T
    assert read_tensor("w", tensor).content.tobytes() == np.array([0, 3, 1, 4, 2, 5], "<i2").tobytes()
    array = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    assert read_tensor("w", array).content.tobytes() == np.array([0, 2, 3, 5], "<i4").tobytes()


def test_parameters_and_lazily_negated_tensors_have_their_real_values() -> None:
    """Parameters and lazily negated tensors are read with their real values."""
    assert read_tensor("w", torch.nn.Parameter(torch.ones(1))).content.tobytes() == np.ones(1, "<f4").tobytes()
    negative = torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert read_tensor("w", negative).content.tobytes() == np.array([-2], "<f4").tobytes()


def test_numpy_arrays_with_dtypes_of_ml_dtypes_are_read() -> None:
    """NumPy arrays with dtypes of ml_dtypes are read."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype, name in ((ml_dtypes.bfloat16, "BF16"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")):
        kind, content = read_tensor("w", np.ones(3, dtype))
        assert kind == TensorKind(name, (3,))
        assert content.tobytes() == np.ones(3, dtype).tobytes()


def test_raw_tensors_must_have_the_bytes_of_their_shape() -> None:
    """A raw tensor must have as many bytes as its dtype and shape require."""
    kind, content = read_tensor("w", RawTensor("F8_E4M3", (2, 2), b"abcd"))
    assert (kind.size, content.tobytes()) == (4, b"abcd")
    for bad in (RawTensor("BF16", (2, 2), b"abcd"), RawTensor("F99", (4,), b"abcd"), RawTensor("U8", (-4,), b"abcd")):
        with pytest.raises(InvalidRequest, match=r"named_tensors\['w'\]"):
            read_tensor("w", bad)


class DTensor(torch.Tensor):
    """Has the name of torch's class of sharded tensors, which needs a process group."""


@pytest.mark.parametrize(
    "bad",
    [[1.0], 1.0, None, torch.ones(2, device="meta"), torch.eye(2).to_sparse(), np.array(["a"]), np.array([object()])],
)
def test_a_value_that_is_no_dense_tensor_is_refused_by_name(bad: Any) -> None:
    """A value that is no dense tensor with data is rejected, and the error names the tensor."""
    with pytest.raises(InvalidRequest, match=r"named_tensors\['model.w'\]"):
        read_tensor("model.w", bad)


def test_a_sharded_tensor_is_refused_by_name() -> None:
    """A sharded tensor is rejected, and the error names it."""
    with pytest.raises(InvalidRequest, match=r"named_tensors\['model.w'\] is a DTensor.*gather it first"):
        read_tensor("model.w", torch.ones(2).as_subclass(DTensor))


@pytest.mark.parametrize("name", ["", 7, None, "__metadata__", "x" * 1025, "a\ud800"])
def test_tensor_names_that_checkpoints_cannot_have_are_refused(name: Any) -> None:
    """Tensor names that checkpoints cannot have are rejected."""
    with pytest.raises(InvalidRequest, match="named_tensors has the name"):
        read_tensor(name, np.ones(1))
