"""Samples and turns with a different value at each position, so that a shift by one is visible."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rollbus.schemas.rows import Rows
from rollbus.trainer import Sample

NUM_EXPERTS = {"u1": 256, "u2": 1000}


def rows_of(num_rows: int, *, layers: int = 2, top_k: int = 3, dtype: str = "u1", seed: int = 0) -> Rows:
    """Return random rows with `top_k` different experts each; the ids use the whole range of the dtype."""
    # Odd steps from a random first id give different ids without a shuffle of all experts for each row.
    first = np.random.default_rng(seed).integers(0, NUM_EXPERTS[dtype], (num_rows, layers, 1))
    step = 2 * np.random.default_rng(seed + 1).integers(0, 40, (num_rows, layers, 1)) + 1
    return ((first + step * np.arange(top_k)) % NUM_EXPERTS[dtype]).astype(dtype)


def sample_of(size: int, *, start: int = 0, first: int = 1, routed: str | None = "u1", **fields: Any) -> Sample:
    """Return a sample that is sampled from position `first` on; each array counts up from a different number."""
    sampled = np.arange(size) >= first
    values: dict[str, Any] = {
        "token_ids": np.arange(100, 100 + size, dtype=np.int32),
        "loss_mask": sampled,
        "logprobs": np.where(sampled, -np.arange(size) / 8, 0).astype(np.float32),
        "weight_versions": np.where(sampled, np.arange(size), -1).astype(np.int32),
        "routed_experts": None if routed is None else rows_of(max(size - 1 - start, 0), dtype=routed, seed=size),
        "start": 0 if routed is None else start,
        "advantage": 0.5,
    }
    return Sample(**(values | fields))


@dataclass
class FakeTurn:
    """The fields that `rollbus.trainer.Turn` requires."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    weight_versions: npt.NDArray[np.int32]
    routed_experts: Rows | None
    start: int = 0
    prompt_len: int = 0
    error: Exception | None = None


def turn_of(whole: Sample, prompt_len: int, end: int, *, start: int | None = 0) -> FakeTurn:
    """Return the turn that sampled positions `prompt_len` to `end - 1` of a sample, with the rows from `start` on."""
    span = slice(prompt_len, end)
    rows = whole.routed_experts
    if start is None or rows is None:
        rows = None
    elif prompt_len == end:
        rows = rows[:0]
    else:
        rows = rows[start : end - 1]
    arrays = whole.token_ids[span], whole.logprobs[span], whole.weight_versions[span]
    return FakeTurn(*arrays, rows, start or 0, prompt_len)


@st.composite
def samples(draw: st.DrawFn, max_size: int = 24) -> Sample:
    """Draw a sample of any length, dtype, start and loss mask, with or without routed experts."""
    size = draw(st.integers(2, max_size))
    routed = draw(st.sampled_from([None, "u1", "u2"]))
    start = draw(st.integers(0, size - 1)) if routed else 0
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    mask[: start + 1] = False
    versions = np.where(mask, np.arange(size), -1).astype(np.int32)
    advantage = draw(st.sampled_from([0.25, np.arange(size, dtype=np.float32)]))
    return sample_of(size, start=start, routed=routed, loss_mask=mask, weight_versions=versions, advantage=advantage)


def spoken(dtype: str = "u1") -> tuple[Sample, FakeTurn, FakeTurn]:
    """Return a sample with two turns: prompt 0 to 2, sampled 3 to 5, tool output 6 and 7, sampled 8 to 10."""
    mask = np.isin(np.arange(11), [3, 4, 5, 8, 9, 10])
    whole = sample_of(
        11, routed=dtype, loss_mask=mask, weight_versions=np.where(mask, 7, -1).astype(np.int32), advantage=0.0,
        logprobs=np.where(mask, -1, 0).astype(np.float32),
    )  # fmt: skip
    return whole, turn_of(whole, 3, 6), turn_of(whole, 8, 11, start=5)


def assert_same(found: Sample, wanted: Sample) -> None:
    """Assert that both samples have the same contents and that the first is writable."""
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", "routed_experts"):
        assert getattr(found, name) is None or getattr(found, name).flags.writeable, name
    assert found.start == wanted.start
    if wanted.routed_experts is None:
        assert found.routed_experts is None
    else:
        assert found.routed_experts is not None
        assert np.array_equal(found.routed_experts, wanted.routed_experts)
