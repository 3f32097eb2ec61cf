"""Whether samples that share a row of a Hugging Face MoE get the logprobs that each gets alone, by family."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollbus.trainer import MicroBatch, PackError, Sample, attention_mask, check_packing, pack
from tests.trainer.builders import sample_of
from tests.trainer.replay_models import FAMILIES, RECURRENT, build

SIZES = (6, 2, 9, 2, 2, 5)
"""Samples of one prediction stand between others, where only a restart of positions shows that they begin."""


APART = [family for family in FAMILIES if family != "gpt_oss"]


def spoken(sizes: tuple[int, ...] = SIZES) -> list[Sample]:
    """Samples of random tokens."""
    random = np.random.default_rng(0)
    return [sample_of(size, routed=None, token_ids=random.integers(3, 50, size).astype(np.int32)) for size in sizes]


def target_logprobs(model: torch.nn.Module, batch: MicroBatch, **inputs: Any) -> torch.Tensor:
    """f32[T]: of each target."""
    with torch.no_grad():
        logits = model(**(batch.model_inputs() | inputs)).logits[0].float()
    return -torch.nn.functional.cross_entropy(logits, batch.target_ids[0], reduction="none")


def off_by(model: torch.nn.Module, inputs: Callable[[MicroBatch], dict[str, Any]] = lambda _: {}) -> float:
    """How far logprobs of packed and padded samples are from those of each alone, without any mask of ours."""
    samples = spoken()
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
def test_packed_samples_do_not_see_each_other(family: str, attention: str, training: bool) -> None:
    """With `model_inputs`, or with `attention_mask`, packed and padded logprobs are those of each sample alone."""
    model = build(family, attn_implementation=attention).train(training)
    (batch,) = pack(spoken(), max_tokens=64)

    assert off_by(model) < 1e-5
    check_packing(model, batch)
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch), "use_cache": True}) < 1e-5
    check_packing(model, batch, attention_mask=attention_mask(batch), use_cache=True)


@pytest.mark.slow
def test_without_model_inputs_samples_do_see_each_other() -> None:
    """Why `use_cache` is False: with transformers' default a sample sees those before it, and nothing says so."""
    model = build("qwen3_moe", attn_implementation="sdpa")
    (batch,) = pack(spoken(), max_tokens=64)

    assert off_by(model, lambda _: {"use_cache": True}) > 1e-3
    with pytest.raises(PackError, match="last segment sees 16 positions"):
        check_packing(model, batch, use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_families_for_one_sample_in_a_micro_batch(family: str) -> None:
    """A state that layers carry along crosses from sample to sample, whatever the mask; alone, samples are right."""
    model = build(family)
    (batch,) = pack(spoken(), max_tokens=64)

    assert off_by(model) > 1e-3
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch)}) > 1e-3
    with pytest.raises(PackError, match=r"in a \w+ForCausalLM the last segment sees .* max_samples=1"):
        check_packing(model, batch)


@pytest.mark.slow
def test_gpt_oss_needs_its_masks() -> None:
    """gpt-oss reads nothing from `position_ids`; a mask for each of its kinds of layers keeps samples apart."""
    model = build("gpt_oss", sliding_window=4)
    (batch,) = pack(spoken(), max_tokens=64)

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
def test_sliding_windows() -> None:
    """A window is kept with `model_inputs`; a mask has to bring it."""
    model = build("mixtral", sliding_window=4)

    assert off_by(model) < 1e-5
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch, sliding_window=4)}) < 1e-5
    assert off_by(model, lambda batch: {"attention_mask": attention_mask(batch)}) > 1e-3


@pytest.mark.slow
def test_what_cannot_be_checked() -> None:
    """One segment alone shows nothing."""
    (batch,) = pack(spoken((5,)), max_tokens=64)

    with pytest.raises(PackError, match="one segment; allowed: two"):
        check_packing(build(), batch)


def test_attention_mask_is_causal_within_samples() -> None:
    """Zero where a position may look, the dtype's lowest number elsewhere; padding sees padding only."""
    (batch,) = pack(spoken((3, 3)), max_tokens=8, pad_to_multiple_of=8)

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


def test_attention_mask_with_a_window() -> None:
    """Each position sees as many as the window has, itself included."""
    (batch,) = pack(spoken((4, 5)), max_tokens=8)

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
