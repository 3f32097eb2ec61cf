import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbus.bus.objects import safetensors_header
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.workers.sources.content import Tensor, read_header
from tests.support.checkpoints import MODEL, write_safetensors


def write(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a file with this header and data."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32", **more: object) -> dict[str, object]:
    """Return the header entry of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def test_a_header_gives_dtypes_and_shapes(tmp_path: Path) -> None:
    """Names, dtypes and shapes are as written, in any order. Metadata are no tensors."""
    header = {"__metadata__": {"format": "pt"}, "b": entry(8, 12, [2], "BF16"), "a": entry(0, 8, [1, 2])}
    path = write(tmp_path / "x", header | {"c": entry(12, 12, [0, 5])}, bytes(12))

    begin = path.stat().st_size - 12
    assert read_header(path) == {
        "a": Tensor("F32", (1, 2), path, begin),
        "b": Tensor("BF16", (2,), path, begin + 8),
        "c": Tensor("F32", (0, 5), path, begin + 12),
    }


@pytest.mark.parametrize(
    ("header", "size", "said"),
    [
        ({"a": entry(0, 4, [1], "F33")}, 4, "of the unknown dtype 'F33'"),
        ({"a": entry(0, 8, [1])}, 8, "has the tensor 'a' at bytes 0 to 8; expected: from 0 on, and 4 bytes for F32[1]"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12, "'b' at bytes 8 to 12; expected: from 4 on"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, 4, "expected: from 4 on"),
        ({"a": entry(4, 0, [1])}, 4, "expected: from 0 on"),
        ({"a": entry(0, 4, [1])}, 3, "is truncated: the tensor 'a' ends at byte 4 of the data, and there are 3"),
        ({"a": entry(0, 4, [1])}, 5, "has 5 bytes of data; its tensors have 4"),
        ({"a": entry(0, 2**70, [2**68])}, 4, "is truncated"),
        ({"a": entry(0, 2**62, [2**31, 2**29])}, 4, "is truncated"),
        ({"a": entry(-4, 0, [1])}, 4, "does not decode"),
        ({"a": entry(0, 4, [1] * 17)}, 4, "does not decode"),
        ({"a": entry(0, 4, [1], other=1)}, 4, "does not decode"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "does not decode"),
        ({"a": 1}, 4, "does not decode"),
        ([], 4, "does not decode"),
        (b"[" * 100_000, 0, "does not decode"),
        (b'{"\xff": 1}', 0, "does not decode"),
        (b"", 0, "does not decode"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, header: Any, size: int, said: str) -> None:
    """A header with holes, overlaps or wrong sizes is rejected, and so is content that is no header."""
    with pytest.raises(ControlError) as raised:
        read_header(write(tmp_path / "x", header, bytes(size)))

    assert raised.value.code is ControlCode.BAD_SOURCE
    assert said in raised.value.message
    assert len(raised.value.message) < 1000


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    """The length of a header is checked against a maximum before it is used, also in a sparse file of that size."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((99_000_000).to_bytes(8, "little"))
        file.truncate(2**41)

    with pytest.raises(ControlError, match="has a header of 99000000 bytes; allowed: 33554432"):
        read_header(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.data())
def test_a_damaged_file_gives_a_header_or_a_control_error(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes are changed or removed, the result is a header or a `ControlError`."""
    content = bytearray(write_safetensors(tmp_path / "x", MODEL).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    is_cut = data.draw(st.booleans())
    if is_cut:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (tmp_path / "x").write_bytes(content)

    try:
        header = read_header(tmp_path / "x")
    except ControlError as error:
        assert error.code is ControlCode.BAD_SOURCE
    else:
        assert not is_cut
        assert len(header) <= len(MODEL) + 1


def refused(path: Path) -> str:
    """Return why the header of a file is refused."""
    with pytest.raises(ControlError) as caught:
        read_header(path)
    assert caught.value.code is ControlCode.BAD_SOURCE
    return caught.value.message


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            b"{" + b",".join(b'"%x":0' % i for i in range(1000)) + b"}",
            "has a header with 1000 colons; allowed: 25, for 5",
        ),
        (b"{" + b",".join(b'"%x":0' % i for i in range(6)) + b"}", "has 6 tensors; allowed: 5 in one file"),
    ],
)
def test_the_number_of_tensors_in_a_file_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes, said: str
) -> None:
    """A header with too many tensors is refused, and one with far too many keys is not decoded at all."""
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 5)
    monkeypatch.setattr(safetensors_header, "MAX_COLONS", 25)

    assert said in refused(write(tmp_path / "x", header))
