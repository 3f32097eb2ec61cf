"""Samples that share a row of a Hugging Face MoE get the logprobs that each gets alone."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.builders import sample_of
from trainer import MicroBatch, Sample, attention_mask, pack

SIZES = (6, 2, 9, 2, 2, 5)
"""Samples of one prediction stand between others, where only a restart of positions shows that they begin."""


def tiny_moe(attention: str) -> torch.nn.Module:
    """A Qwen3-MoE of two layers with random weights, in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        attn_implementation=attention,
    )  # fmt: skip
    model: torch.nn.Module = Qwen3MoeForCausalLM(config)
    return model.float()


def spoken(sizes: tuple[int, ...] = SIZES) -> list[Sample]:
    """Samples of random tokens."""
    random = np.random.default_rng(0)
    return [sample_of(size, routed=None, token_ids=random.integers(0, 64, size).astype(np.int32)) for size in sizes]


def target_logprobs(model: torch.nn.Module, batch: MicroBatch, **inputs: Any) -> torch.Tensor:
    """f32[T]: of each target."""
    with torch.no_grad():
        logits = model(**(batch.model_inputs() | inputs)).logits[0].float()
    return -torch.nn.functional.cross_entropy(logits, batch.target_ids[0], reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [False, True])
def test_packed_samples_do_not_see_each_other(attention: str, training: bool) -> None:
    """With `model_inputs`, or with `attention_mask`, packed and padded logprobs are those of each sample alone."""
    model = tiny_moe(attention).train(training)
    given_samples = spoken()
    (batch,) = pack(given_samples, max_tokens=64, pad_to_multiple_of=32)

    packed = target_logprobs(model, batch)
    masked = target_logprobs(model, batch, attention_mask=attention_mask(batch), use_cache=True)

    for index, sample in enumerate(given_samples):
        (alone,) = pack([sample], max_tokens=64)
        wanted = target_logprobs(model, alone, position_ids=None)
        here = batch.sample_indices[0] == index
        torch.testing.assert_close(packed[here], wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(masked[here], wanted, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_without_model_inputs_samples_do_see_each_other() -> None:
    """Why `use_cache` is False: with transformers' default a sample sees those before it, and nothing says so."""
    model = tiny_moe("sdpa")
    (batch,) = pack(spoken(), max_tokens=64)

    leaking = target_logprobs(model, batch, use_cache=True)

    assert (leaking - target_logprobs(model, batch)).abs().max() > 1e-3


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
