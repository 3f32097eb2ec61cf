"""Buffered rows keep their order, and large arrays are not copied."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.buffers import KEPT_BYTES, RowBuffer
from rollbus.schemas.rows import Rows

ROW = (4, 2)
ROW_BYTES = 8
NUM_LARGE = KEPT_BYTES // ROW_BYTES


def rows_of(count: int, first: int = 0) -> Rows:
    """Return u1[count, 4, 2], with values that differ from their neighbours."""
    rows: Rows = ((np.arange(count * ROW_BYTES) + first) % 251).astype("u1").reshape(count, *ROW)
    return rows


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, NUM_LARGE - 1, NUM_LARGE, NUM_LARGE + 5]), max_size=8),
    takes=st.lists(st.integers(0, 3 * NUM_LARGE * ROW_BYTES), max_size=12),
)
def test_bytes_keep_their_order_for_any_sizes_of_steps_and_chunks(sizes: list[int], takes: list[int]) -> None:
    """The bytes keep their order for any sizes of steps and chunks."""
    run, expected = RowBuffer(), b""
    for i, size in enumerate(sizes):
        rows = rows_of(size, i)
        run.add(rows)
        expected += rows.tobytes()
    taken = b""
    for take in takes:
        part = bytes(run.pop(min(take, len(expected) - len(taken))))
        taken += part
    rest = len(expected) - len(taken)
    assert taken + bytes(run.pop(rest)) == expected


def test_a_prompt_s_rows_are_not_copied() -> None:
    """A chunk of a prompt's rows is a view of the engine's array."""
    rows, run = rows_of(NUM_LARGE), RowBuffer()
    run.add(rows)
    assert np.shares_memory(np.frombuffer(run.pop(100), "u1"), rows)


def test_a_small_part_of_a_large_array_is_copied() -> None:
    """A small part of a large array is copied, so that a slow client does not keep the whole array in memory."""
    rows, run = rows_of(4 * NUM_LARGE), RowBuffer()
    run.add(rows[:NUM_LARGE])
    assert not np.shares_memory(np.frombuffer(run.pop(100), "u1"), rows)


def test_after_clear_only_later_rows_remain() -> None:
    """After `clear`, only later rows remain."""
    run = RowBuffer()
    run.add(rows_of(3))
    run.clear()
    run.add(rows_of(1, 7))
    assert bytes(run.pop(ROW_BYTES)) == rows_of(1, 7).tobytes()
