"""Slices of routed experts of any size are stitched to the original rows."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rollbus.schemas.rows import Rows
from rollbus.trainer import CheckpointMismatch, StitchError, stitch_rows
from rollbus.trainer.checkpoint import checkpoint_tensors
from rollbus.trainer.stitching import Overlap, RowStitcher
from tests.engine.tiny_families import FAMILIES, make_family
from tests.trainer.models import rows_of


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, Rows, list[tuple[int, Rows]]]:
    """Draw rows and gapless slices of them; a slice may have dtype u1 if its ids fit."""
    dtype = draw(st.sampled_from(["u1", "u2"]))
    rows = rows_of(draw(st.integers(0, 20)), dtype=dtype, layers=draw(st.integers(1, 3)), top_k=draw(st.integers(1, 4)))
    start = draw(st.integers(0, 1000))
    ends = [*sorted(draw(st.lists(st.integers(0, len(rows)), max_size=6))), len(rows)]
    begins = [0, *(draw(st.integers(0, end)) for end in ends[:-1])]
    pieces = [(start + begin, rows[begin : max(begin, end)]) for begin, end in zip(begins, ends, strict=True)]
    narrow = [
        (at, piece.astype("u1") if piece.max(initial=0) < 256 and draw(st.booleans()) else piece)
        for at, piece in pieces
    ]
    return start, rows, narrow


class Counted(np.ndarray[Any, Any]):
    """Rows that count their length and slice operations."""

    looks = 0

    def __len__(self) -> int:
        """Return the number of rows and count the call."""
        Counted.looks += 1
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Any:
        """Return a view and count the call."""
        Counted.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("overlap", ["refuse", "first", "last"])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("reach", [1, 2])
def test_the_cost_per_slice_is_constant(
    overlap: Overlap, order: int, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost per slice is constant, in both directions, with and without overlap."""
    count, rows = 1000, rows_of(1001)
    pieces = [(at, rows[at : at + reach].view(Counted)) for at in range(count)][::order]
    monkeypatch.setattr(Counted, "looks", 0)

    _, found = stitch_rows(pieces, overlap=overlap)

    assert Counted.looks < 20 * count
    assert np.array_equal(np.asarray(found), rows[: count + reach - 1])


def test_the_remaining_row_of_a_replaced_slice_is_copied() -> None:
    """With `last`, a remaining row of a replaced slice is copied, so that the memory of the slice is freed."""
    rows = rows_of(4000, layers=24, top_k=8)
    run = RowStitcher("last")
    tracemalloc.start()
    try:
        for at in range(0, 400, 10):
            run.add("piece", at, rows[at : at + 3600].copy())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 2 * rows.nbytes


@given(cut(), st.sampled_from(["refuse", "first", "last"]))
def test_rows_that_are_cut_in_any_way_are_restored_whole(
    case: tuple[int, Rows, list[tuple[int, Rows]]], overlap: Overlap
) -> None:
    """Rows that are cut in any way, with overlaps, empty slices and mixed dtypes, are restored whole and writable."""
    start, rows, pieces = case
    wanted = np.result_type(*(piece.dtype for _, piece in pieces))

    found_start, found = stitch_rows(pieces, overlap=overlap)

    assert found_start == start
    assert found.dtype == wanted
    assert np.array_equal(found, rows)
    assert found.flags.writeable
    assert found.flags.owndata


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=6), st.booleans())
def test_each_position_has_the_row_of_the_first_or_last_slice(spans: list[tuple[int, int]], last: bool) -> None:
    """With `first` or `last`, each position has the row of the first or last slice that covers it."""
    pieces = [(at, rows_of(n, seed=i)) for i, (at, n) in enumerate(spans)]
    table: dict[int, Rows] = {}
    has_gap = False
    for at, piece in pieces:
        if table and len(piece) and (at > max(table) + 1 or at + len(piece) < min(table)):
            has_gap = True
            break
        for i, row in enumerate(piece):
            if last or at + i not in table:
                table[at + i] = row

    if has_gap:
        with pytest.raises(StitchError, match="leave a gap"):
            stitch_rows(pieces, overlap="last" if last else "first")
        return
    start, rows = stitch_rows(pieces, overlap="last" if last else "first")

    assert len(rows) == len(table)
    assert all(np.array_equal(row, table[start + i]) for i, row in enumerate(rows))


def test_id_300_survives_a_u1_slice() -> None:
    """A u1 slice does not change u2 ids after it or at the position where both meet."""
    narrow = np.array([[[1, 2]], [[3, 4]]], np.uint8)
    wide = np.array([[[300, 4]], [[301, 302]]], np.uint16)

    assert stitch_rows([(0, narrow), (2, wide)])[1].tolist() == [[[1, 2]], [[3, 4]], [[300, 4]], [[301, 302]]]
    assert stitch_rows([(0, narrow), (1, wide)], overlap="last")[1].tolist() == [[[1, 2]], [[300, 4]], [[301, 302]]]
    assert stitch_rows([(2, wide), (0, narrow)])[1].tolist() == [[[1, 2]], [[3, 4]], [[300, 4]], [[301, 302]]]


def test_empty_slices_give_an_empty_array_with_the_widest_dtype() -> None:
    """Empty slices give an empty array with their layout and the widest dtype."""
    start, rows = stitch_rows([(7, np.empty((0, 3, 2), np.uint8)), (9, np.empty((0, 3, 2), np.uint16))])

    assert (start, rows.shape) == (7, (0, 3, 2))
    assert rows.dtype == np.uint16


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_prompt_rows_come_from_prefill_and_other_rows_from_decode(dtype: str) -> None:
    """If decode also returns the whole sequence, the prompt's rows come from prefill and the other rows from decode."""
    start, prompt_len, sampled = 2, 6, 4
    prefill, decode = rows_of(4, dtype=dtype, seed=1), rows_of(7, dtype=dtype, seed=2)

    found_start, rows = stitch_rows([(start, prefill), (start, decode)], overlap="first")

    assert (found_start, rows.dtype, len(rows)) == (start, np.dtype(dtype), prompt_len - start + sampled - 1)
    assert np.array_equal(rows, np.concatenate([prefill[: prompt_len - start], decode[prompt_len - start :]]))


def test_the_order_of_experts_within_a_top_k_does_not_count() -> None:
    """The same experts in another order are equal; the order of the first slice is kept."""
    rows = rows_of(4)

    assert np.array_equal(stitch_rows([(0, rows), (1, rows[1:, :, ::-1])])[1], rows)


def test_the_error_names_the_slice_and_position_that_do_not_fit() -> None:
    """A gap, different rows, or another layout, dtype or shape is an error with the slice and the position."""
    rows = rows_of(6)
    other = rows.copy()
    other[3, 1] = [250, 251, 252] if 250 not in rows[3, 1] else [1, 2, 3]
    empty = np.empty((0, 2, 4), np.uint8)

    def refused(*pieces: tuple[int, Rows]) -> str:
        with pytest.raises(StitchError) as caught:
            stitch_rows(pieces)
        return str(caught.value)

    assert "piece 1: rows of positions 7 to 12 leave a gap, 6 to 6;" in refused((0, rows), (7, rows))
    assert "piece 1: rows of positions 0 to 5 leave a gap, 6 to 7;" in refused((8, rows), (0, rows))
    assert "piece 1: its row for position 13, layer 1, disagrees" in refused((10, rows), (10, other))
    assert "piece 2, from position 6: 2 layers of top-4, after 2 layers of top-3" in refused(
        (0, rows[:3]), (3, rows[3:]), (6, empty)
    )
    assert "piece 0: routed_experts is int16 of shape (6, 2, 3); allowed: a numpy array of uint8" in refused(
        (0, rows.astype(np.int16))
    )
    assert "piece 0: routed_experts is uint8 of shape (6, 3)" in refused((0, rows[:, 0]))
    assert "piece 0: start is -1; allowed: an integer, 0 and above" in refused((-1, rows))
    assert "there are no pieces" in refused()
    with pytest.raises(StitchError, match="overlap is 'newest'; allowed: refuse, first, last"):
        stitch_rows([(0, rows)], overlap="newest")  # type: ignore[arg-type]


# Rule: a model's tensors have the checkpoint's names and the bytes of `save_pretrained`, or raise an error.


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def load(folder: Path) -> Any:
    """Load a model with the dtype of its checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """The tensors equal those of `save_pretrained` for MoE, dense and tied models, also after a weight change."""
    folder = make_family(tmp_path / "first", family, seed=1)
    model = load(folder)
    assert_equal(dict(checkpoint_tensors(model, folder)), read(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "second")
    assert_equal(dict(checkpoint_tensors(model, folder)), read(tmp_path / "second"))


def test_small_files_have_the_same_tensors(tmp_path: Path) -> None:
    """The tensors of a checkpoint with several files have the names of all its files."""
    model = load(make_family(tmp_path / "one", "mixtral", seed=1))
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert_equal(dict(checkpoint_tensors(model, tmp_path / "many")), read(tmp_path / "many"))


def test_a_tied_weight_that_the_checkpoint_stores_twice_is_yielded_twice(tmp_path: Path) -> None:
    """A tied weight is yielded under both names if the checkpoint stores both."""
    from safetensors.torch import save_file

    folder = make_family(tmp_path, "qwen2-tied", seed=1)
    tensors = read(folder)
    model = load(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_equal(dict(checkpoint_tensors(model, folder)), tensors)
    assert "lm_head.weight" not in dict(checkpoint_tensors(model))


def test_another_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """A model that does not fit the checkpoint is rejected with the first differing name."""
    model = load(make_family(tmp_path / "llama", "llama", seed=1))
    gpt2 = make_family(tmp_path / "gpt2", "gpt2", seed=1)
    with pytest.raises(CheckpointMismatch, match=r"the model has lm_head\.weight, which is not in"):
        dict(checkpoint_tensors(model, gpt2))
    with pytest.raises(CheckpointMismatch, match="has no safetensors files"):
        dict(checkpoint_tensors(model, tmp_path))


def test_weights_on_the_meta_device_are_rejected_by_name(tmp_path: Path) -> None:
    """A model on the meta device is rejected, because its weights have no content."""
    model = load(make_family(tmp_path, "llama", seed=1)).to("meta")
    with pytest.raises(CheckpointMismatch, match=r"model\.embed_tokens\.weight is a slice, or not in"):
        dict(checkpoint_tensors(model))
