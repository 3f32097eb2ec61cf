"""Stored objects turn the old content into the new content, and the snapshot is the committed content or empty."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.bus.publish import draft as packing
from rollbus.bus.publish.draft import Draft, DraftPlan
from rollbus.bus.publish.tensors import RawTensor, Snapshot, TensorKind
from rollbus.schemas.errors import InvalidRequest
from tests.bus.weights.rebuild import draw, from_anchor, from_delta

BOTH = DraftPlan(has_delta=True, has_anchor=True)
ANCHOR = DraftPlan(has_delta=False, has_anchor=True)
DELTA = DraftPlan(has_delta=True, has_anchor=False)

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


def make_draft(plan: DraftPlan, snapshot: Snapshot, kinds: Mapping[str, TensorKind] | None = None) -> Draft:
    """Return a draft."""
    return Draft(plan, snapshot, kinds)


def publish(plan: DraftPlan, snapshot: Snapshot, tensors: Arrays) -> tuple[Draft, dict[str, bytes]]:
    """Pass tensors through a draft, and return the draft and its objects."""
    draft = make_draft(plan, snapshot)
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
        draft = make_draft(DraftPlan(has_delta=False, has_anchor=True, rank=rank, num_ranks=3), Snapshot())
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
