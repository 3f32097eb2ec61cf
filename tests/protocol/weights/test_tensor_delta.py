"""Encoded tensors: applying is the inverse of encoding for any bytes, and damaged or hostile deltas are rejected."""

import itertools

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.weights import tensors
from rollbus.bus.protocol.weights.tensors import (
    DeltaError,
    Encoded,
    apply_delta,
    encode_delta,
    max_body_bytes,
    undo_delta,
)

ITEM_BYTES = (1, 2, 4, 8)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw old and new content of one tensor with no, few, many or only changed elements."""
    item_bytes = draw(st.sampled_from(ITEM_BYTES))
    num_items = draw(st.integers(0, 5000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, num_items * item_bytes, np.uint8)
    new = old.copy()
    is_changed = rng.random(num_items) < draw(st.sampled_from((0.0, 0.0005, 0.02, 0.4, 0.6, 1.0)))
    new.reshape(num_items, item_bytes)[is_changed] ^= rng.integers(
        1, 256, (int(is_changed.sum()), item_bytes), np.uint8
    )
    return old, new, item_bytes


@given(pair=pairs(), has_old=st.booleans())
def test_applying_is_the_inverse_of_encoding(pair: tuple[np.ndarray, np.ndarray, int], has_old: bool) -> None:
    """Applying a delta restores the new content bit for bit after any change."""
    old, new, item_bytes = pair
    encoded = encode_delta(old if has_old else None, new, item_bytes)
    content = old.copy() if has_old else np.zeros_like(new)
    apply_delta(encoded, content, item_bytes)
    assert content.tobytes() == new.tobytes()
    assert len(encoded.data) <= encoded.body_bytes <= max(len(new), max_body_bytes("sparse", 1, 0, 8))


@given(pair=pairs())
def test_undoing_is_the_inverse_of_applying(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    """Undoing a delta restores the old content bit for bit. A dense encoding cannot be undone."""
    old, new, item_bytes = pair
    encoded, content = encode_delta(old, new, item_bytes), new.copy()
    if encoded.encoding == "dense":
        with pytest.raises(DeltaError):
            undo_delta(encoded, content, item_bytes)
    else:
        undo_delta(encoded, content, item_bytes)
        assert content.tobytes() == old.tobytes()


@pytest.mark.parametrize("block", [1, 2, 7, 300])
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 5000])
def test_gaps_are_encoded_correctly_at_the_bounds_of_bytes_and_blocks(
    gap: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps are encoded correctly around each length that needs another byte, wherever a block ends."""
    monkeypatch.setattr(tensors, "BLOCK", block)
    monkeypatch.setattr(tensors, "COMPARED", block)
    old = np.zeros(2 * (3 * gap + 4 + 300), np.uint8)
    new = old.copy()
    for number in range(3):
        new.view("<u2")[(number + 1) * gap + number] = number + 1
    encoded = encode_delta(old, new, 2)
    assert (encoded.encoding, encoded.num_changed) == ("sparse", 3)
    apply_delta(encoded, old, 2)
    assert old.tobytes() == new.tobytes()


def test_floats_are_compared_as_bits() -> None:
    """Floats are compared as bits: minus zero differs from zero, and an unchanged NaN is no change."""
    old = np.array([0.0, np.nan, 1.0, 2.0, 3.0], "<f4").view(np.uint8)
    new = np.array([-0.0, np.nan, 1.0, 2.0, 3.0], "<f4").view(np.uint8)
    assert encode_delta(old, old.copy(), 4).encoding == "same"
    assert encode_delta(old, new, 4).num_changed == 1


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
def test_changes_between_the_smallest_and_largest_elements_are_restored(item_bytes: int) -> None:
    """Changes between the smallest and largest elements, by one up or down, and of a float's sign are restored."""
    ends = [0, 1, (1 << (8 * item_bytes - 1)) - 1, 1 << (8 * item_bytes - 1), (1 << (8 * item_bytes)) - 1]
    pairs = np.array([*itertools.product(ends, ends), *((0, 0),) * 25], f"<u{item_bytes}")
    old, new = np.ascontiguousarray(pairs[:, 0]).view(np.uint8), np.ascontiguousarray(pairs[:, 1]).view(np.uint8)
    encoded = encode_delta(old, new, item_bytes)
    assert (encoded.encoding, encoded.num_changed) == ("sparse", 20)
    content = old.copy()
    apply_delta(encoded, content, item_bytes)
    assert content.tobytes() == new.tobytes()
    undo_delta(encoded, content, item_bytes)
    assert content.tobytes() == old.tobytes()


def test_a_change_to_a_neighbour_uses_about_a_byte() -> None:
    """If 5 % of bfloat16 elements change to a neighbour, each change takes less than 1.1 bytes, position included."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 1 << 18, np.uint16)
    new = old.copy()
    changed = np.flatnonzero(rng.random(len(old)) < 0.05)
    new[changed] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(changed))
    encoded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2)
    assert len(encoded.data) < 1.1 * len(changed)


def test_a_delta_with_more_than_half_of_the_elements_is_dense() -> None:
    """A delta with more than half of the elements is dense, because gaps and values would take more bytes."""
    old = np.zeros(200, np.uint8)
    for num_changed, encoding in ((50, "sparse"), (51, "dense")):
        new = old.copy()
        new.view("<u2")[:num_changed] = 1
        assert encode_delta(old, new, 2).encoding == encoding


@given(
    encoding=st.sampled_from(("same", "sparse", "dense")),
    count=st.integers(-5, 200),
    body=st.binary(max_size=300),
    body_bytes=st.none() | st.integers(0, 2**40),
    is_packed=st.booleans(),
    item_bytes=st.sampled_from(ITEM_BYTES),
)
def test_any_bytes_are_applied_within_the_content_or_refused(
    encoding: tensors.Encoding,
    count: int,
    body: bytes,
    body_bytes: int | None,
    is_packed: bool,
    item_bytes: int,
) -> None:
    """Any bytes are applied within the content or rejected as damaged."""
    data = zstandard.compress(body) if is_packed else body
    encoded = Encoded(encoding, count, len(body) if body_bytes is None else body_bytes, data)
    content = np.zeros(64 * item_bytes, np.uint8)
    try:
        apply_delta(encoded, content, item_bytes)
    except DeltaError as error:
        assert str(error)


def test_a_damaged_delta_is_refused_or_gives_content_of_the_same_size() -> None:
    """A damaged delta is rejected, or gives other content of the same size, which the hash then detects."""
    old = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    new = old.copy()
    new[::97] += 1
    encoded = encode_delta(old, new, 2)
    damaged = [
        bytes(byte ^ (1 << bit if at == place else 0) for place, byte in enumerate(encoded.data))
        for at, bit in itertools.product(range(0, len(encoded.data), 3), range(8))
    ]
    damaged += [encoded.data[:end] for end in range(len(encoded.data))]
    for data in damaged:
        content = old.copy()
        try:
            apply_delta(encoded._replace(data=data), content, 2)
        except DeltaError:
            continue
        assert len(content) == len(old)


def test_decompression_bombs_are_refused_before_memory_is_allocated() -> None:
    """A frame that decompresses to more than announced, has no size or has an impossible size is rejected.

    No memory is allocated for it.
    """
    content = np.zeros(1024, np.uint8)
    bomb = zstandard.compress(bytes(1 << 26))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024))
    for encoded in (
        Encoded("dense", 0, 1024, bomb),
        Encoded("dense", 0, 1024, unsized),
        Encoded("dense", 0, 1 << 26, bomb),
        Encoded("sparse", 512, 1 << 26, bomb),
        Encoded("sparse", 1 << 60, 1 << 62, bomb),
        Encoded("same", 0, 1 << 26, bomb),
    ):
        with pytest.raises(DeltaError):
            apply_delta(encoded, content, 2)


def test_positions_behind_the_last_element_are_refused() -> None:
    """Positions behind the last element, an incomplete gap and wrong numbers of gaps are rejected."""
    content = np.zeros(64, np.uint8)
    for gaps, values in (
        (b"\x40", b"ab"),
        (b"\xff" * 9, b""),
        (b"\x00\xff", b"ab"),
        (b"\x00", b"abcd"),
        (b"\x00\x00", b"ab"),
    ):
        body = gaps + values
        with pytest.raises(DeltaError):
            apply_delta(Encoded("sparse", len(values) // 2, len(body), body), content, 2)
