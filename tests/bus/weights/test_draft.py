"""Stored objects turn the old content into the new content, and the snapshot is the committed content or empty."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.bus.protocol.weights.chain import Contents
from rollbus.bus.publish import draft as packing
from rollbus.bus.publish.draft import Draft
from rollbus.bus.publish.tensors import (
    RawTensor,
    Snapshot,
    TensorKind,
    folder_tensors,
    read_checkpoint_folder,
    read_tensor,
)
from rollbus.schemas.errors import InvalidRequest
from tests.bus.weights.rebuild import draw, from_anchor, from_delta

BOTH = Contents(anchor=True, delta=True)
ANCHOR = Contents(anchor=True, delta=False)
DELTA = Contents(anchor=False, delta=True)

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(seed: int = 0) -> Arrays:
    """Return a small model of several dtypes, with a scalar and an empty tensor."""
    rng = np.random.default_rng(seed)
    return {
        "b.half": rng.integers(0, 2**16, (40, 20), np.uint16).view(np.float16),
        "a.full": rng.standard_normal((30, 10)).astype(np.float32),
        "scale": np.asarray(rng.standard_normal()),
        "none": np.empty((0, 4), np.int8),
        "mask": rng.integers(0, 2, 77).astype(bool),
    }


def make_draft(contents: Contents, snapshot: Snapshot, kinds: Mapping[str, TensorKind] | None = None) -> Draft:
    """Return a draft."""
    return Draft(contents, snapshot, kinds)


def publish(contents: Contents, snapshot: Snapshot, tensors: Arrays) -> tuple[Draft, dict[str, bytes]]:
    """Pass tensors through a draft, and return the draft and its objects."""
    draft = make_draft(contents, snapshot)
    objects = draw(draft, tensors.items())
    return draft, objects


def as_bytes(tensors: Arrays) -> dict[str, bytes]:
    """Return the bytes of each tensor."""
    return {name: np.asarray(tensor).tobytes() for name, tensor in tensors.items()}


def changed(tensors: Arrays, seed: int, share: float) -> Arrays:
    """Return a copy in which a share of each tensor's bytes differs."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, tensor in tensors.items():
        content = np.frombuffer(np.asarray(tensor).tobytes(), np.uint8).copy()
        is_other = rng.random(len(content)) < share
        content[is_other] = rng.integers(0, 256, int(is_other.sum()), np.uint8)
        if tensor.dtype == bool:
            content &= 1
        result[name] = content.view(tensor.dtype).reshape(tensor.shape)
    return result


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), min_size=1, max_size=4), st.booleans())
def test_deltas_and_anchors_give_the_same_contents(shares: list[float], reverses: bool) -> None:
    """Deltas and anchors produce the same contents."""
    snapshot = Snapshot()
    tensors = arrays()
    draft, objects = publish(ANCHOR, snapshot, tensors)
    before = from_anchor(draft.entries(), objects)
    assert before == as_bytes(tensors)
    draft.commit("d" * 64)
    for seed, share in enumerate(shares):
        tensors = changed(tensors, seed, share)
        if reverses:
            tensors = dict(reversed(tensors.items()))
        draft, objects = publish(BOTH, snapshot, tensors)
        entries = draft.entries()
        assert from_anchor(entries, objects) == as_bytes(tensors)
        assert from_delta(entries, objects, before) == as_bytes(tensors)
        before = from_delta(entries, objects, before)
        draft.commit("d" * 64)
    assert {name: tensor.content.tobytes() for name, tensor in snapshot.tensors.items()} == before


def test_tensors_that_did_not_change_are_not_stored() -> None:
    """A delta contains only the tensors that changed."""
    snapshot = Snapshot()
    tensors = arrays()
    draft, _ = publish(ANCHOR, snapshot, tensors)
    draft.commit("d" * 64)
    tensors["a.full"] = tensors["a.full"].copy()
    tensors["a.full"][3, 3] = 7
    draft, objects = publish(DELTA, snapshot, tensors)
    assert [entry.name for entry in draft.entries() if entry.delta is not None] == ["a.full"]
    assert (draft.num_changed, list(objects)) == (1, ["delta-0000"])
    assert draft.delta_bytes < 20


def test_an_anchor_computes_all_hashes_again() -> None:
    """An anchor computes all hashes again: with a wrong hash in the snapshot, no worker could build later versions."""
    snapshot = Snapshot()
    tensors = arrays()
    draft, _ = publish(ANCHOR, snapshot, tensors)
    right = {entry.name: entry.sha256 for entry in draft.entries()}
    draft.commit("d" * 64)
    for tensor in snapshot.tensors.values():
        tensor.sha256 = "0" * 64
    draft, _ = publish(ANCHOR, snapshot, tensors)
    assert {entry.name: entry.sha256 for entry in draft.entries()} == right


def test_an_uncommitted_publication_does_not_change_the_snapshot() -> None:
    """A publication that is not committed does not change the snapshot."""
    snapshot = Snapshot()
    tensors = arrays()
    draft, _ = publish(ANCHOR, snapshot, tensors)
    assert not snapshot
    draft.commit("d" * 64)
    for share in (0.01, 0.2, 1.0):
        draft, _ = publish(BOTH, snapshot, changed(tensors, 1, share))
        assert not snapshot
        draft.restore()
        assert snapshot.digest == "d" * 64
        assert {name: tensor.content.tobytes() for name, tensor in snapshot.tensors.items()} == as_bytes(tensors)


def test_a_committed_publication_is_not_undone() -> None:
    """A committed publication is not undone, because a cancellation takes effect only after the commit."""
    snapshot = Snapshot()
    draft, _ = publish(ANCHOR, snapshot, arrays())
    draft.commit("d" * 64)
    tensors = changed(arrays(), 1, 0.2)
    draft, _ = publish(DELTA, snapshot, tensors)
    draft.commit("e" * 64)
    draft.restore()
    assert snapshot.digest == "e" * 64
    assert {name: tensor.content.tobytes() for name, tensor in snapshot.tensors.items()} == as_bytes(tensors)


def test_a_snapshot_that_cannot_be_restored_becomes_empty() -> None:
    """If the snapshot cannot be restored, it becomes empty, because an interrupt may leave any bytes in it."""
    snapshot = Snapshot()
    draft, _ = publish(ANCHOR, snapshot, arrays())
    draft.commit("d" * 64)
    content = snapshot.tensors["a.full"].content
    tensors = changed(arrays(), 1, 0.01)
    draft, _ = publish(DELTA, snapshot, tensors)
    content[17] ^= 1
    draft.restore()
    assert (snapshot.tensors, snapshot.digest) == ({}, "")


def test_memory_that_changes_during_a_publication_is_never_committed() -> None:
    """If the caller's memory changes during a publication, the next version is compared with the committed hash."""
    snapshot = Snapshot()
    tensors = {"w": np.zeros(64, np.float32)}
    draft, _ = publish(ANCHOR, snapshot, tensors)
    draft.commit("d" * 64)
    tensors["w"][3] = 1
    draft, _ = publish(DELTA, snapshot, tensors)
    tensors["w"][4] = 1
    draft.commit("e" * 64)
    draft, _ = publish(DELTA, snapshot, tensors)
    [entry] = draft.entries()
    assert entry.delta is not None
    assert entry.sha256 == hashlib.sha256(tensors["w"].tobytes()).hexdigest()


def test_the_snapshot_is_no_view_of_the_callers_memory() -> None:
    """The snapshot copies the caller's memory."""
    snapshot = Snapshot()
    weights = np.ones(8, np.float32)
    draft, _ = publish(ANCHOR, snapshot, {"w": weights})
    draft.commit("d" * 64)
    weights[:] = 2
    draft, _ = publish(DELTA, snapshot, {"w": weights})
    assert draft.num_changed == 1


def test_objects_and_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta objects and safetensors files have a maximum size."""
    monkeypatch.setattr(packing, "DELTA_BYTES", 3000)
    monkeypatch.setattr(packing, "SHARD_BYTES", 3000)
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal(n).astype(np.float32) for i, n in enumerate((300, 300, 2000, 10, 10, 300))}
    snapshot = Snapshot()
    draft, objects = publish(ANCHOR, snapshot, tensors)
    assert list(objects) == [f"model-{i:05d}.safetensors" for i in range(1, 4)]
    assert from_anchor(draft.entries(), objects) == as_bytes(tensors)
    draft.commit("d" * 64)
    before, tensors = as_bytes(tensors), changed(tensors, 1, 1.0)
    draft, objects = publish(DELTA, snapshot, tensors)
    assert len(objects) > 2
    assert from_delta(draft.entries(), objects, before) == as_bytes(tensors)


def test_different_ranks_never_use_the_same_object_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different ranks never use the same object name."""
    monkeypatch.setattr(packing, "SHARD_BYTES", 100)
    names: set[str] = set()
    for rank in range(3):
        draft = Draft(ANCHOR, Snapshot(), None, rank=rank, num_ranks=3)
        objects = draw(draft, {f"{rank}.{i}": np.ones(20, np.float32) for i in range(3)}.items())
        assert not names & objects.keys()
        names |= objects.keys()
    assert len(names) == 9


@pytest.mark.parametrize("has_snapshot", [True, False])
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", np.ones(3, np.float16))], r"named_tensors\['a'\] is F16\[3\]; allowed: F32\[3\]"),
        ([("a", np.ones((3, 1), np.float32))], r"named_tensors\['a'\] is F32\[3, 1\]"),
        ([("c", np.ones(3, np.float32))], r"named_tensors\['c'\] is an unexpected tensor"),
        ([("a", np.ones(3, np.float32))], r"named_tensors\['b'\] is missing"),
        ([("a", np.ones(3, np.float32))] * 2, r"named_tensors\['a'\] was given twice"),
        ([], "is missing|no tensors"),
    ],
)
def test_other_tensors_than_expected_are_refused(
    tensors: list[tuple[str, object]], message: str, has_snapshot: bool
) -> None:
    """Unexpected, duplicate, missing and mismatching tensors are rejected, and the error names the tensor."""
    snapshot = Snapshot()
    kinds = {name: TensorKind("F32", (3,)) for name in ("a", "b")}
    if has_snapshot:
        draft, _ = publish(ANCHOR, snapshot, {name: np.ones(3, np.float32) for name in kinds})
        draft.commit("d" * 64)
    with pytest.raises(InvalidRequest, match=message):
        draw(make_draft(BOTH, snapshot, None if has_snapshot else kinds), tensors)


def test_a_large_position_is_found() -> None:
    """A change at a large position is found.

    Positions use more than 32 bits only if necessary, which needs 2**31 bytes.
    """
    snapshot = Snapshot()
    content = np.zeros(70_000_000, np.uint8)
    draft, _ = publish(ANCHOR, snapshot, {"w": content})
    draft.commit("d" * 64)
    content[-1] = 1
    draft = make_draft(DELTA, snapshot)
    objects = draw(draft, [("w", RawTensor("U8", content.shape, content))])
    [entry] = draft.entries()
    assert entry.delta.num_changed == 1
    assert sum(map(len, objects.values())) < 1000


# `read_tensor` returns the bytes of a tensor of any library, and rejects values that are no whole tensor.


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


# A publisher reads a checkpoint folder with the reader and the checks of a worker.


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
