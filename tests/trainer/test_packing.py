"""Micro-batches: the samples that share one, and how their arrays are aligned."""

import heapq
import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbus.trainer import NO_EXPERT, MicroBatch, PackError, Sample, attention_mask, check_packing, pack
from rollbus.trainer.packing import fit
from tests.trainer.models import FAMILIES, RECURRENT, build, rows_of, sample_of, samples


def assert_holds(batch: MicroBatch, packed: list[Sample]) -> list[int]:
    """Assert that each prediction equals its sample's and other entries are padding; return the sample indices."""
    (indices,) = batch.sample_indices.tolist()
    bounds = batch.cu_seqlens.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(indices))
    found = []
    for begin, end in itertools.pairwise(bounds):
        at = slice(begin, end)
        (index,) = set(indices[at])
        size = end - begin
        assert batch.position_ids[0, at].tolist() == list(range(size))
        if index == -1:
            assert end == bounds[-1]
            assert not batch.loss_mask[0, at].any()
            assert (batch.weight_versions[0, at] == -1).all()
            assert batch.routed_experts is None or (batch.routed_experts[0, at] == NO_EXPERT).all()
            for zero in (batch.input_ids, batch.target_ids, batch.advantages, batch.sampler_logprobs):
                assert not zero[0, at].any()
            continue
        found.append(index)
        sample = packed[index]
        advantage = np.broadcast_to(np.asarray(sample.advantage, np.float32), len(sample))
        for tensor, array in (
            (batch.input_ids, sample.token_ids[:-1]),
            (batch.target_ids, sample.token_ids[1:]),
            (batch.loss_mask, sample.loss_mask[1:]),
            (batch.sampler_logprobs, np.where(sample.loss_mask, sample.logprobs, 0)[1:]),
            (batch.weight_versions, sample.weight_versions[1:]),
            (batch.advantages, advantage[1:]),
        ):
            assert np.array_equal(tensor[0, at].numpy(), array[:size])
        if batch.routed_experts is not None and sample.routed_experts is not None:
            rows = batch.routed_experts[0, at].numpy()
            assert (rows[: sample.start] == NO_EXPERT).all()
            assert np.array_equal(rows[sample.start :], sample.routed_experts[: max(size - sample.start, 0)])
        if batch.routed_experts is not None:
            no_row = (batch.routed_experts[0, at] == NO_EXPERT).flatten(1).any(dim=1)
            assert not (no_row & batch.loss_mask[0, at]).any()
    return found


@pytest.mark.proves("P23")
@pytest.mark.slow
@given(st.lists(samples(), max_size=8), st.integers(1, 20), st.integers(1, 8), st.none() | st.integers(1, 3))
def test_each_sample_is_in_exactly_one_batch(
    given_samples: list[Sample], multiples: int, multiple: int, max_samples: int | None
) -> None:
    """With truncation and separated routed experts, each sample is in exactly one batch, whole or cut at its end."""
    max_tokens = multiples * multiple
    batches = pack(
        given_samples,
        max_tokens=max_tokens,
        max_samples=max_samples,
        pad_to_multiple_of=multiple,
        too_long="truncate",
        without_routing="separate",
    )

    members = [assert_holds(batch, given_samples) for batch in batches]
    assert sorted(itertools.chain.from_iterable(members)) == list(range(len(given_samples)))
    assert all(len(found) <= (max_samples or len(given_samples)) for found in members)
    for batch in batches:
        used = int((batch.sample_indices >= 0).sum())
        assert batch.input_ids.shape[1] <= max_tokens
        assert batch.input_ids.shape[1] == -(-used // multiple) * multiple


DTYPES = {
    "input_ids": torch.int64, "target_ids": torch.int64, "position_ids": torch.int64, "loss_mask": torch.bool,
    "advantages": torch.float32, "sampler_logprobs": torch.float32, "weight_versions": torch.int32,
    "sample_indices": torch.int32, "cu_seqlens": torch.int32,
}  # fmt: skip


@pytest.mark.parametrize(("routed", "dtype"), [("u1", torch.int16), ("u2", torch.int32), (None, None)])
def test_all_tensors_are_writable_and_the_batchs_own(routed: str | None, dtype: torch.dtype | None) -> None:
    """Each tensor is writable and owned by the batch, even if the samples are read-only like received bytes."""
    sample = sample_of(9, routed=routed)
    arrays = [sample.token_ids, sample.loss_mask, sample.logprobs, sample.weight_versions]
    before = [array.copy() for array in arrays]
    rows = sample.routed_experts
    for array in (*arrays, *(() if rows is None else (rows,))):
        array.flags.writeable = False

    (batch,) = pack([sample], max_tokens=16, pad_to_multiple_of=16)

    for name, wanted in DTYPES.items():
        tensor = getattr(batch, name)
        assert tensor.dtype == wanted, name
        assert tensor.shape == ((3,) if name == "cu_seqlens" else (1, 16)), name
        tensor.fill_(1)
    assert (batch.routed_experts is None) == (dtype is None)
    if batch.routed_experts is not None:
        assert (batch.routed_experts.dtype, batch.routed_experts.shape) == (dtype, (1, 16, 2, 3))
        batch.routed_experts.fill_(1)
    assert all(np.array_equal(array, old) for array, old in zip(arrays, before, strict=True))


@pytest.mark.proves("P23")
def test_padding_is_not_expert_0() -> None:
    """Expert 0 stays 0, the highest ids of both dtypes keep their values, and only padding is -1."""
    for dtype, highest in ((np.uint8, 255), (np.uint16, 65535)):
        rows = np.array([[[0, highest]], [[highest, 0]]], dtype)
        (batch,) = pack([sample_of(3, routed_experts=rows)], max_tokens=4, pad_to_multiple_of=4)
        assert batch.routed_experts[0, :, 0].tolist() == [[0, highest], [highest, 0], [-1, -1], [-1, -1]]


def test_u1_and_u2_samples_share_a_batch() -> None:
    """If one sample has wide ids, all batches are wide, and no id is cut."""
    wide = rows_of(4, dtype="u2")
    wide[0, 0] = [300, 301, 302]

    batches = pack([sample_of(5), sample_of(5, routed_experts=wide), sample_of(9)], max_tokens=8)

    assert [batch.routed_experts.dtype for batch in batches if batch.routed_experts is not None] == [torch.int32] * 2
    assert batches[1].routed_experts[0, 4, 0].tolist() == [300, 301, 302]


def test_samples_without_routed_experts_are_rejected_or_separated() -> None:
    """Samples without routed experts are rejected or separated, as chosen.

    They are accepted if no sample has routed experts, or if they train no token.
    """
    routed, bare = sample_of(5), sample_of(5, routed=None)
    untrained = sample_of(4, first=4, routed=None)

    with pytest.raises(
        PackError, match=r"sample 1 has no routed experts, and others have them; allowed: .*\"separate\""
    ):
        pack([routed, bare], max_tokens=100)
    batches = pack([bare, routed, bare], max_tokens=100, without_routing="separate")
    assert [batch.routed_experts is None for batch in batches] == [False, True]
    assert [assert_holds(batch, [bare, routed, bare]) for batch in batches] == [[1], [0, 2]]
    (batch,) = pack([bare, bare], max_tokens=100)
    assert batch.routed_experts is None
    (batch,) = pack([untrained, routed], max_tokens=100)
    assert (batch.routed_experts[0, :3] == NO_EXPERT).all()


def test_a_missing_row_is_refused_only_where_it_is_needed() -> None:
    """Positions before `start` have no row. A prompt allows this; a trained position without a row is an error."""
    pack([sample_of(9, start=3, first=4)], max_tokens=100)

    with pytest.raises(PackError) as caught:
        pack([sample_of(9), sample_of(9, start=4, first=4)], max_tokens=100)
    assert str(caught.value).startswith("sample 1: no row for position 3, whose prediction is trained; its rows begin")
    with pytest.raises(PackError, match="sample 0: no row for position 0"):
        pack([sample_of(9, start=8, first=1)], max_tokens=100)


WRONG: dict[str, tuple[list[Sample], dict[str, Any], str]] = {
    "one token": ([sample_of(5), sample_of(1)], {}, "sample 1 has 1 tokens, which is no prediction; allowed: 2"),
    "too long": (
        [sample_of(5), sample_of(12)],
        {},
        "sample 1 has 12 tokens, which is 11 predictions (S - 1); al",
    ),
    "top_k": ([sample_of(5), sample_of(5, routed_experts=rows_of(4, top_k=2))], {}, "sample 1 has 2 layers of top-2"),
    "layers": ([sample_of(5), sample_of(5, routed_experts=rows_of(4, layers=1))], {}, "sample 1 has 1 layers of top-3"),
    "max_tokens": ([], {"max_tokens": 0}, "max_tokens is 0; allowed: an integer, 1 and above"),
    "fraction": ([], {"max_tokens": 10.0}, "max_tokens is of type float; allowed: an integer, 1 and above"),
    "max_samples": ([], {"max_samples": 0}, "max_samples is 0; allowed: an integer, 1 and above"),
    "no multiple": ([], {"pad_to_multiple_of": 64}, "max_tokens is 10; allowed: multiples of pad_to_multiple_of, 64"),
    "a number": ([sample_of(5), 3], {}, "sample 1 is int; allowed: rollbus.trainer.Sample"),  # type: ignore[list-item]
    "not in a list": (sample_of(5), {}, "samples is Sample; allowed: a list, or"),  # type: ignore[dict-item]
    "multiple": ([], {"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0; allowed: an integer, 1 and above"),
    "too_long": ([], {"too_long": "drop"}, "too_long is 'drop'; allowed: refuse, truncate"),
    "without_routing": ([], {"without_routing": "pad"}, "without_routing is 'pad'; allowed: refuse, separate"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_error_names_the_sample_or_option_that_cannot_be_packed(wrong: str) -> None:
    """The error names the sample or option and the allowed values."""
    given_samples, options, message = WRONG[wrong]

    with pytest.raises(PackError) as caught:
        pack(given_samples, **{"max_tokens": 10, **options})

    assert message in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_truncation_keeps_tokens_and_rows_together() -> None:
    """A sample cut to 6 predictions keeps the first 6 inputs, targets and rows, with and without `start`."""
    for start in (0, 2, 8):
        sample = sample_of(12, start=start, first=9)
        (batch,) = pack([sample], max_tokens=6, too_long="truncate")
        assert assert_holds(batch, [sample]) == [0]
        assert batch.input_ids.shape == (1, 6)
        assert batch.target_ids[0, -1] == sample.token_ids[6]


def test_packing_is_deterministic() -> None:
    """The same samples always give the same batches, and equal samples keep their order."""
    given_samples = [sample_of(size) for size in (5, 3, 5, 9, 2, 5)]

    members = [assert_holds(batch, given_samples) for batch in pack(given_samples, max_tokens=8)]

    assert members == [[3], [0, 2], [1, 4, 5]]
    assert [assert_holds(batch, given_samples) for batch in pack(given_samples, max_tokens=8)] == members


def test_max_samples_limits_the_samples_of_each_batch() -> None:
    """`max_samples` limits the samples of each batch, also of separated ones, and the batches are reproducible."""
    given_samples = [sample_of(size) for size in (5, 3, 5, 9, 2, 5)]

    def members(limit: int) -> list[list[int]]:
        return [assert_holds(batch, given_samples) for batch in pack(given_samples, max_tokens=64, max_samples=limit)]

    assert members(1) == [[3], [0], [2], [5], [1], [4]]
    assert members(2) == members(2) == [[0, 3], [2, 5], [1, 4]]
    bare = [sample_of(4, routed=None), sample_of(4), sample_of(4, routed=None)]
    assert len(pack(bare, max_tokens=64, max_samples=1, without_routing="separate")) == 3


def test_any_iterable_of_samples_is_packed() -> None:
    """Packing reads a generator of samples once."""
    assert len(pack((sample_of(size) for size in (5, 6)), max_tokens=5)) == 2


def test_logprobs_are_finite_where_nothing_is_trained() -> None:
    """Untrained entries have logprob 0.0 even for NaN or -inf, so `(new - sampler) * mask` is a number."""
    logprobs = np.array([np.nan, np.nan, -np.inf, -1, -np.inf], np.float32)
    (batch,) = pack([sample_of(5, first=3, logprobs=logprobs)], max_tokens=4)

    assert batch.sampler_logprobs.tolist() == [[0.0, 0.0, -1.0, -np.inf]]


def test_batches_are_built_in_cpu_memory_with_any_default_device() -> None:
    """Batches are built in CPU memory, also if the default device is another device."""
    with torch.device("meta"):
        (batch,) = pack([sample_of(5)], max_tokens=8, pad_to_multiple_of=8)

    assert assert_holds(batch, [sample_of(5)]) == [0]


def test_rows_are_copied_once() -> None:
    """Packing copies the rows once, directly into the tensors, and allocates no other array of their size."""
    sample = sample_of(2001, routed_experts=rows_of(2000, layers=8, top_k=4))
    tracemalloc.start()
    try:
        (batch,) = pack([sample], max_tokens=2000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # tracemalloc does not see torch's memory, only the allocations of numpy and Python.
    assert batch.routed_experts is not None
    assert peak < sample.routed_experts.nbytes


def test_the_repr_shows_only_sizes_and_to_moves_all_tensors() -> None:
    """The repr of a batch shows only sizes, and `to` moves all tensors."""
    (batch,) = pack([sample_of(9), sample_of(4)], max_tokens=16, pad_to_multiple_of=4)

    assert repr(batch) == "<MicroBatch predictions=12 segments=3 rows=torch.int16 1x12x2x3>"
    assert repr(pack([sample_of(2, routed=None)], max_tokens=1)[0]) == "<MicroBatch predictions=1 segments=1 rows=none>"
    moved = batch.to("meta")
    assert {getattr(moved, name).device.type for name in (*DTYPES, "routed_experts")} == {"meta"}


def naive_fit(sizes: list[int], capacity: int, max_items: int | None) -> list[list[int]]:
    """Implement best-fit decreasing by its definition, with a scan of all bins for each item."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rooms = [(capacity - sum(sizes[i] for i in members), at) for at, members in enumerate(bins)]
        fitting = [(room, at) for room, at in rooms if room >= sizes[index] and len(bins[at]) != max_items]
        if fitting:
            bins[min(fitting)[1]].append(index)
        else:
            bins.append([index])
    return [sorted(members) for members in bins]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 60), st.none() | st.integers(1, 4))
def test_the_heap_chooses_the_bins_of_best_fit_decreasing(
    sizes: list[int], capacity: int, max_items: int | None
) -> None:
    """The heap implementation chooses the same bins as a scan of all bins, also with ties."""
    assert fit(sizes, capacity, max_items) == naive_fit(sizes, capacity, max_items)


def test_bins_are_full_if_possible_and_equal_items_keep_their_order() -> None:
    """Bins are full if possible, equal items keep their order, and an item above the capacity is an error."""
    assert fit([5, 5, 3, 7, 2, 8], 10) == [[4, 5], [2, 3], [0, 1]]
    assert fit([1, 1, 1], 1) == [[0], [1], [2]]
    assert fit([5, 5, 3, 7, 2, 8], 20, 2) == [[3, 5], [0, 1], [2, 4]]
    assert fit([], 10) == []
    with pytest.raises(ValueError, match="item 1 is of size 11; allowed: 0 to 10"):
        fit([1, 11], 10)


def test_each_item_needs_at_most_four_heap_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item needs at most four heap operations, regardless of the number of bins, and no item is lost."""
    count, operations = 10_000, 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal operations
            operations += 1
            return function(*args)

        return call

    for name in ("heappush", "heappop"):
        monkeypatch.setattr(heapq, name, counted(getattr(heapq, name)))
    sizes = [1 + i * 7919 % 97 for i in range(count)]

    bins = fit(sizes, 100)

    assert operations <= 4 * count
    assert sorted(index for members in bins for index in members) == list(range(count))
    assert len(bins) <= 1.25 * math.ceil(sum(sizes) / 100)


# The logprobs of packed samples equal the logprobs of each sample alone, depending on the model family.


SIZES = (6, 2, 9, 2, 2, 5)
"""Samples of one prediction lie between others: only the restarted positions mark their beginning."""


APART = [family for family in FAMILIES if family != "gpt_oss"]


def random_samples(sizes: tuple[int, ...] = SIZES) -> list[Sample]:
    """Return samples of random tokens."""
    random = np.random.default_rng(0)
    return [sample_of(size, routed=None, token_ids=random.integers(3, 50, size).astype(np.int32)) for size in sizes]


def target_logprobs(model: torch.nn.Module, batch: MicroBatch, **inputs: Any) -> torch.Tensor:
    """Return the logprob of each target, f32[T]."""
    with torch.no_grad():
        logits = model(**(batch.model_inputs() | inputs)).logits[0].float()
    return -torch.nn.functional.cross_entropy(logits, batch.target_ids[0], reduction="none")


def off_by(model: torch.nn.Module, *variants: Callable[[MicroBatch], dict[str, Any]]) -> list[float]:
    """Return the largest difference between the logprobs of packed, padded samples and those of each sample alone.

    Args:
        variants: functions that return further inputs of the model for the packed samples; there is a result for each.
    """
    samples = random_samples()
    (batch,) = pack(samples, max_tokens=64, pad_to_multiple_of=32)
    of_sample = [batch.sample_indices[0] == index for index in range(len(samples))]
    alone = [
        target_logprobs(model, each, position_ids=None) for sample in samples for each in pack([sample], max_tokens=64)
    ]
    differences = []
    for variant in variants:
        packed = target_logprobs(model, batch, **variant(batch))
        differences.append(max(float((packed[at] - one).abs().max()) for at, one in zip(of_sample, alone, strict=True)))
    return differences


def as_packed(_: MicroBatch) -> dict[str, Any]:
    """Return no inputs besides those of `model_inputs`."""
    return {}


def masked(batch: MicroBatch) -> dict[str, Any]:
    """Return an explicit mask."""
    return {"attention_mask": attention_mask(batch)}


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "training"), [("eager", False), ("sdpa", True)])
@pytest.mark.parametrize("family", APART)
def test_packed_samples_do_not_attend_to_each_other(family: str, attention: str, training: bool) -> None:
    """With `model_inputs` or `attention_mask`, packed, padded samples have the logprobs of each sample alone."""
    model = build(family, attn_implementation=attention).train(training)
    (batch,) = pack(random_samples(), max_tokens=64)

    assert max(off_by(model, as_packed, lambda batch: masked(batch) | {"use_cache": True})) < 1e-5
    check_packing(model, batch)
    check_packing(model, batch, attention_mask=attention_mask(batch), use_cache=True)


@pytest.mark.slow
def test_without_model_inputs_packed_samples_attend_to_each_other() -> None:
    """With `use_cache`, the default of transformers, a packed sample silently attends to earlier samples.

    `model_inputs` therefore sets it to False.
    """
    model = build("qwen3_moe", attn_implementation="sdpa")
    (batch,) = pack(random_samples(), max_tokens=64)

    assert min(off_by(model, lambda _: {"use_cache": True})) > 1e-3
    with pytest.raises(PackError, match="last segment sees 16 positions"):
        check_packing(model, batch, use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_families_need_micro_batches_of_one_sample(family: str) -> None:
    """The state of recurrent layers leaks between packed samples despite any mask.

    So a batch is correct only with a single sample.
    """
    model = build(family)
    (batch,) = pack(random_samples(), max_tokens=64)

    assert min(off_by(model, as_packed, masked)) > 1e-3
    with pytest.raises(PackError, match=r"in a \w+ForCausalLM the last segment sees .* max_samples=1"):
        check_packing(model, batch)


@pytest.mark.slow
def test_gpt_oss_needs_its_masks() -> None:
    """gpt-oss ignores `position_ids`; one mask for each kind of attention layer separates the samples."""
    model = build("gpt_oss", sliding_window=4)
    (batch,) = pack(random_samples(), max_tokens=64)

    def masks(batch: MicroBatch) -> dict[str, Any]:
        window = model.config.sliding_window
        return {
            "attention_mask": {
                "full_attention": attention_mask(batch),
                "sliding_attention": attention_mask(batch, sliding_window=window),
            }
        }

    without, with_masks = off_by(model, as_packed, masks)
    assert (without > 1e-3, with_masks < 1e-5) == (True, True)
    with pytest.raises(PackError, match="GptOssForCausalLM"):
        check_packing(model, batch)
    check_packing(model, batch, **masks(batch))


@pytest.mark.slow
def test_model_inputs_keeps_a_sliding_window() -> None:
    """`model_inputs` keeps a sliding window; an explicit mask must contain the window."""
    model = build("mixtral", sliding_window=4)

    def windowed(batch: MicroBatch) -> dict[str, Any]:
        return {"attention_mask": attention_mask(batch, sliding_window=4)}

    *right, without_window = off_by(model, as_packed, windowed, masked)
    assert max(right) < 1e-5
    assert without_window > 1e-3


@pytest.mark.slow
def test_a_batch_with_only_one_segment_cannot_be_checked() -> None:
    """A batch with only one segment cannot be checked."""
    (batch,) = pack(random_samples((5,)), max_tokens=64)

    with pytest.raises(PackError, match="one segment; allowed: two"):
        check_packing(build(), batch)


def test_attention_mask_is_causal_within_samples() -> None:
    """The mask is 0 where a position may attend, and the dtype's lowest value elsewhere.

    Padding attends only to padding.
    """
    (batch,) = pack(random_samples((3, 3)), max_tokens=8, pad_to_multiple_of=8)

    mask = attention_mask(batch, dtype=torch.bfloat16)

    assert (mask.dtype, mask.shape) == (torch.bfloat16, (1, 1, 8, 8))
    assert (mask == 0)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ]
    assert mask.min() == torch.finfo(torch.bfloat16).min


def test_attention_mask_limits_each_position_to_the_window() -> None:
    """With a sliding window each position attends to this number of positions, including itself."""
    (batch,) = pack(random_samples((4, 5)), max_tokens=8)

    assert (attention_mask(batch, sliding_window=2) == 0)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    for wrong in (0, 2.5):
        with pytest.raises(PackError, match=r"sliding_window is .*; allowed: an integer, 1 and above"):
            attention_mask(batch, sliding_window=wrong)  # type: ignore[arg-type]
