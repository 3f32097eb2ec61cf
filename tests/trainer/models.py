"""Tiny MoE models of several families, and routed experts for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rollbus.schemas.rows import Rows
from rollbus.trainer import Sample

NUM_EXPERTS = 8
TOP_K = 3
Run = dict[str, Tensor]
"""Logits, and gradients by parameter name."""

_COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    "use_cache": False,
}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"norm_topk_prob": True}),
    "qwen3_moe-plain": ("Qwen3Moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen2_moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 16}),
    "mixtral": ("Mixtral", {}),
    "olmoe": ("Olmoe", {}),
    "deepseek_v3": ("DeepseekV3", _LATENT | _GROUPS | {"num_key_value_heads": 4, "routed_scaling_factor": 2.5}),
    "deepseek_v2": ("DeepseekV2", _LATENT | _GROUPS | {"num_key_value_heads": 4, "topk_method": "greedy"}),
    "glm4_moe": ("Glm4Moe", _GROUPS | {"routed_scaling_factor": 1.5}),
    "minimax_m2": ("MiniMaxM2", {"rotary_dim": 8}),
    "gpt_oss": ("GptOss", {}),
    "granitemoe": ("GraniteMoe", {}),
}
"""Class prefix and settings, by family."""
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
_NEMOTRON_GROUPS = {"n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 16}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _LINEAR | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 16}),
    "minimax": ("MiniMax", {"block_size": 4}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _MAMBA | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16},
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON | _NEMOTRON_GROUPS | {"hybrid_override_pattern": "ME*E"}),
}
"""Class prefix and settings of families with layers that carry a state from token to token."""


def build(family: str = "qwen3_moe", *, num_layers: int = 3, **settings: Any) -> Any:
    """Make a model with reproducible random weights, in float32 and training mode."""
    import transformers

    prefix, particular = (FAMILIES | RECURRENT)[family]
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(**_COMMON | {"num_hidden_layers": num_layers} | particular | settings)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3, generator=generator)
    return model.train()


def moe_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a router and experts, by layer."""
    return [module for module in model.modules() if hasattr(module, "experts") and module is not model]


def router_of(block: nn.Module) -> nn.Module:
    """Return the router of a block."""
    router = block.router if hasattr(block, "router") else block.gate
    assert isinstance(router, nn.Module)
    return router


@contextmanager
def seen(model: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """Record for each block the router's own output and the inputs and outputs of the experts."""
    blocks = moe_blocks(model)
    found: list[dict[str, Tensor]] = [{} for _ in blocks]
    handles = []
    for block, calls in zip(blocks, found, strict=True):

        def on_router(_: nn.Module, __: Any, output: Any, calls: dict[str, Tensor] = calls) -> None:
            calls["logits"], calls["own_weights"], calls["own_ids"] = (tensor.detach() for tensor in output)

        def on_experts(_: nn.Module, given: Any, output: Tensor, calls: dict[str, Tensor] = calls) -> None:
            calls["input"], calls["ids"], calls["weights"] = (tensor.detach() for tensor in given)
            calls["output"] = output.detach()

        handles.append(router_of(block).register_forward_hook(on_router))
        assert isinstance(block.experts, nn.Module)
        handles.append(block.experts.register_forward_hook(on_experts))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def tokens(num_tokens: int, *, batch: int = 1) -> Tensor:
    """Return reproducible token ids, i64[B, T]."""
    return torch.randint(3, 50, (batch, num_tokens), generator=torch.Generator().manual_seed(num_tokens))


def random_rows(num_tokens: int, num_layers: int, *, seed: int = 0, batch: int = 1) -> Tensor:
    """Return random rows, i16[B, T, L, K], that no router chose."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, num_tokens, num_layers, NUM_EXPERTS, generator=generator)
    return scores.topk(TOP_K, dim=-1).indices.to(torch.int16)


def own_rows(model: nn.Module, num_tokens: int, *, batch: int = 1) -> Tensor:
    """Return the routers' choice for `tokens` as rows i64[B, T, L, K]; L counts only layers with experts."""
    with seen(model) as calls, torch.no_grad():
        model(input_ids=tokens(num_tokens, batch=batch))
    return torch.stack([call["own_ids"] for call in calls], dim=1).reshape(batch, num_tokens, len(calls), TOP_K)


def run(model: Any, num_tokens: int = 11, *, batch: int = 1) -> Run:
    """Run a forward and a backward pass over `tokens`; return the logits and gradients."""
    model.zero_grad()
    logits = model(input_ids=tokens(num_tokens, batch=batch)).logits
    logits.logsumexp(dim=-1).sum().backward()
    gradients = {
        name.removeprefix("_orig_mod."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"logits": logits.detach()} | gradients


def difference(one: Run, other: Run) -> float:
    """Return the largest difference between two runs, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1e-3)) for name in one)


# Samples and turns with a different value at each position, so that a shift by one is visible.


BUILDERS_NUM_EXPERTS = {"u1": 256, "u2": 1000}


def rows_of(num_rows: int, *, layers: int = 2, top_k: int = 3, dtype: str = "u1", seed: int = 0) -> Rows:
    """Return random rows with `top_k` different experts each; the ids use the whole range of the dtype."""
    # Odd steps from a random first id give different ids without a shuffle of all experts for each row.
    first = np.random.default_rng(seed).integers(0, BUILDERS_NUM_EXPERTS[dtype], (num_rows, layers, 1))
    step = 2 * np.random.default_rng(seed + 1).integers(0, 40, (num_rows, layers, 1)) + 1
    return ((first + step * np.arange(top_k)) % BUILDERS_NUM_EXPERTS[dtype]).astype(dtype)


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
