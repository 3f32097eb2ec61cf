"""The logprobs of packed samples equal the logprobs of each sample alone, depending on the model family."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollbus.trainer import MicroBatch, PackError, Sample, attention_mask, check_packing, pack
from tests.trainer.builders import sample_of
from tests.trainer.replay_models import FAMILIES, RECURRENT, build

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


def off_by(model: torch.nn.Module, inputs: Callable[[MicroBatch], dict[str, Any]] = lambda _: {}) -> float:
    """Return the largest difference between the logprobs of packed, padded samples and those of each sample alone."""
    samples = random_samples()
    (batch,) = pack(samples, max_tokens=64, pad_to_multiple_of=32)
    packed = target_logprobs(model, batch, **inputs(batch))
    differences = []
    for index, sample in enumerate(samples):
        (alone,) = pack([sample], max_tokens=64)
        wanted = target_logprobs(model, alone, position_ids=None)
        differences.append((packed[batch.sample_indices[0] == index] - wanted).abs().max())
    return float(max(differences))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", APART)
def test_packed_samples_do_not_attend_to_each_other(family: str, attention: str, training: bool) -> None:
    """With `model_inputs` or `attention_mask`, packed, padded samples have the logprobs of each sample alone."""
    model = build(family, attn_implementation=attention).train(training)
    (batch,) = pack(random_samples(), max_tokens=64)

    assert off_by(model) < 1e-5
    check_packing(model, batch)
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch), "use_cache": True}) < 1e-5
    check_packing(model, batch, attention_mask=attention_mask(batch), use_cache=True)


@pytest.mark.slow
def test_without_model_inputs_packed_samples_attend_to_each_other() -> None:
    """With `use_cache`, the default of transformers, a packed sample silently attends to earlier samples.

    `model_inputs` therefore sets it to False.
    """
    model = build("qwen3_moe", attn_implementation="sdpa")
    (batch,) = pack(random_samples(), max_tokens=64)

    assert off_by(model, lambda _: {"use_cache": True}) > 1e-3
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

    assert off_by(model) > 1e-3
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch)}) > 1e-3
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

    assert off_by(model) > 1e-3
    with pytest.raises(PackError, match="GptOssForCausalLM"):
        check_packing(model, batch)
    assert off_by(model, masks) < 1e-5
    check_packing(model, batch, **masks(batch))


@pytest.mark.slow
def test_model_inputs_keeps_a_sliding_window() -> None:
    """`model_inputs` keeps a sliding window; an explicit mask must contain the window."""
    model = build("mixtral", sliding_window=4)

    assert off_by(model) < 1e-5
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch, sliding_window=4)}) < 1e-5
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch)}) > 1e-3


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
