"""A publisher reads a checkpoint folder with the reader and the checks of a worker."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollbus.bus.publish.tensors import folder_tensors, read_checkpoint_folder
from rollbus.schemas.errors import InvalidRequest


def write(file: Path, offsets: dict[str, tuple[int, int]], data: bytes) -> None:
    """Write a file with byte tensors at these offsets."""
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in offsets.items()
    }
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def test_tensors_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Tensors are read in the order of the file, also if the header has another order."""
    write(tmp_path / "model.safetensors", {"b": (2, 5), "a": (0, 2)}, bytes([1, 2, 3, 4, 5]))

    read = [(name, bytes(np.asarray(tensor.data))) for name, tensor in folder_tensors(tmp_path)]

    assert read == [("a", bytes([1, 2])), ("b", bytes([3, 4, 5]))]
    assert {name: kind.shape for name, kind in read_checkpoint_folder(tmp_path).kinds.items()} == {"a": (2,), "b": (3,)}


@pytest.mark.parametrize(
    ("offsets", "data", "said"),
    [
        ({"a": (0, 4)}, bytes(3), "is truncated: the tensor 'a' ends at byte 4 of the data, and there are 3"),
        ({"a": (0, 2), "b": (3, 4)}, bytes(4), "expected: from 2 on"),
        ({"a": (0, 2)}, bytes(4), "has 4 bytes of data; its tensors have 2"),
    ],
)
def test_a_file_that_a_worker_would_refuse_is_not_published(
    tmp_path: Path, offsets: dict[str, tuple[int, int]], data: bytes, said: str
) -> None:
    """A truncated file and a file with a gap or surplus data are rejected. The error names the file and the field."""
    write(tmp_path / "model.safetensors", offsets, data)

    for read in (read_checkpoint_folder, lambda folder: list(folder_tensors(folder))):
        with pytest.raises(InvalidRequest, match=r"model\.safetensors") as raised:
            read(tmp_path)
        assert raised.value.field == "checkpoint"
        assert said in str(raised.value)


@pytest.mark.parametrize("name", ["notes (1).txt", "-x", "überblick.md", "delta-notes.json"])
def test_the_error_names_a_file_with_a_forbidden_name(tmp_path: Path, name: str) -> None:
    """A file whose name workers reject is named in the error.

    Hidden files are not part of a version and may have any name.
    """
    write(tmp_path / "model.safetensors", {"a": (0, 1)}, b"x")
    for file in ("config.json", ".hidden (1)"):
        (tmp_path / file).write_text("{}")
    assert read_checkpoint_folder(tmp_path).files.keys() == {"config.json"}
    (tmp_path / name).write_text("x")
    with pytest.raises(InvalidRequest, match="whose name no version can contain") as raised:
        read_checkpoint_folder(tmp_path)
    assert raised.value.field == "checkpoint"
    assert repr(name) in str(raised.value)
