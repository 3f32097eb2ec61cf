"""Files that the safetensors library can read, with tensors in the order in which the library writes them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rollbus.bus.protocol.weights.tensors import index_of, layouts, ordered
from rollbus.schemas.manifest import TensorEntry

safetensors = pytest.importorskip("safetensors.numpy")

TENSORS: dict[str, npt.NDArray[Any]] = {
    "z.half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "a.byte": np.arange(3, dtype=np.uint8),
    "m.double": np.arange(2, dtype=np.float64),
    "b.single": np.arange(4, dtype=np.float32).reshape(4, 1),
    "c.scalar": np.array(7, dtype=np.int64),
    "d.empty": np.empty((0, 5), dtype=np.float32),
}
DTYPES = {"float16": "F16", "uint8": "U8", "float64": "F64", "float32": "F32", "int64": "I64"}


def entry(name: str, file: str = "model.safetensors") -> TensorEntry:
    """Return the description of one of `TENSORS`."""
    array = TENSORS[name]
    return TensorEntry(
        name=name,
        dtype=DTYPES[array.dtype.name],
        shape=array.shape,
        sha256=hashlib.sha256(array.tobytes()).hexdigest(),
        file=file,
    )


def content(entries: list[TensorEntry]) -> bytes:
    """Return the bytes of a file with these tensors."""
    [layout] = layouts(entries)
    data = layout.header + b"".join(TENSORS[entry.name].tobytes() for entry in layout.entries)
    assert layout.size == len(data)
    for one, offset in layout.offsets():
        assert data[offset : offset + one.size] == TENSORS[one.name].tobytes()
    return data


def test_the_safetensors_library_reads_each_tensor_of_a_layout() -> None:
    """The library reads each tensor with its dtype, shape and content, for any order of the tensors."""
    names = [name for name in TENSORS if name != "z.half"]
    for order in (ordered(map(entry, TENSORS)), [entry(name) for name in [*names, "z.half"]]):
        read = safetensors.load(content(order))

        assert read.keys() == TENSORS.keys()
        for name, array in TENSORS.items():
            assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
            assert read[name].tobytes() == array.tobytes()


def test_tensors_are_aligned_as_in_the_safetensors_library() -> None:
    """Tensors with larger elements come first, and the data starts at a multiple of 8 bytes.

    Each tensor is therefore aligned to its element size.
    """
    ours, theirs = content(ordered(map(entry, TENSORS))), safetensors.save(TENSORS)

    for data in (ours, theirs):
        assert (8 + int.from_bytes(data[:8], "little")) % 8 == 0
    [layout] = layouts(ordered(map(entry, TENSORS)))
    assert all(offset % one.item_bytes == 0 for one, offset in layout.offsets())
    header = json.loads(theirs[8 : 8 + int.from_bytes(theirs[:8], "little")])
    header.pop("__metadata__", None)
    sizes = [TENSORS[name].itemsize for name in sorted(header, key=lambda name: header[name]["data_offsets"])]
    assert [one.item_bytes for one in layout.entries] == sizes


def test_an_index_names_the_file_of_each_tensor(tmp_path: Path) -> None:
    """The index names the file of each tensor and the total size. Each file has its own layout."""
    names = sorted(TENSORS)
    entries = [entry(name, f"model-{number // 3}.safetensors") for number, name in enumerate(names)]
    index = json.loads(index_of(entries))

    assert index["weight_map"] == {one.name: one.file for one in entries}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())
    for layout in layouts(entries):
        data = content(list(layout.entries))
        path = tmp_path / layout.name
        path.write_bytes(data)
        assert set(safetensors.load_file(path)) == {name for name in names if index["weight_map"][name] == layout.name}
