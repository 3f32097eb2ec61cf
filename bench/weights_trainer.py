"""A trainer without a model: a random checkpoint in bfloat16, which AdamW changes step by step.

A step needs no forward pass. AdamW divides each gradient by its own size, so the movement of a weight depends only on
the sequence of gradients. The gradients of policy gradients on random advantages follow each other like independent
normal values. `MEASURED` has the figures of a real model. `Trainer.step` returns the figures of this trainer. The
gradients of one block are used for all tensors, each at a different place.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe, make_tokenizer

MEASURED: Final = {
    1e-6: {1: 1.9, 2: 1.5, 4: 1.1, 8: 1.0, 24: 0.8},
    3e-6: {1: 3.9, 2: 4.9, 4: 3.7, 8: 3.1, 24: 2.3},
}
"""Percent of the elements in bfloat16 that one step changed, by learning rate and step. The model had 281 million
parameters and the same shape, with policy gradients of 256 tokens per step, and AdamW from a checkpoint in bfloat16."""

FILE: Final = "model.safetensors"
NUM_LAYERS, HIDDEN, HEAD = 28, 1024, 128
QUERIES, KEYS, INNER = 16 * HEAD, 8 * HEAD, 3072
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "intermediate_size": INNER,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""The configuration of Qwen3-0.6B."""
LAYER: Final = {
    "self_attn.q_proj.weight": (QUERIES, HIDDEN),
    "self_attn.k_proj.weight": (KEYS, HIDDEN),
    "self_attn.v_proj.weight": (KEYS, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, QUERIES),
    "self_attn.q_norm.weight": (HEAD,),
    "self_attn.k_norm.weight": (HEAD,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
INIT_STD: Final = 0.02

BETAS: Final = (0.9, 0.999)
EPSILON: Final = 1e-8
GRADIENT_STD: Final = 1e-5
BLOCK: Final = 2**22
"""Number of elements for which gradients are drawn."""


def make_checkpoint(folder: Path, *, small: bool) -> Path:
    """Create a random model in `folder` if it is missing. Return the folder.

    Args:
        small: create a tiny MoE instead of the shape of Qwen3-0.6B.
    """
    if small:
        return make_tiny_moe(folder)
    if not (folder / FILE).exists():
        scratch = folder.with_name(f".{folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        generator = torch.Generator().manual_seed(0)
        save_file({name: _initial(shape, generator) for name, shape in _shapes()}, scratch / FILE, {"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(CONFIG, indent=1))
        make_tokenizer(scratch)
        scratch.rename(folder)
    return folder


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], HIDDEN)
    for layer in range(NUM_LAYERS):
        for name, shape in LAYER.items():
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (HIDDEN,)


def _initial(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, INIT_STD, generator=generator)


class Trainer:
    """AdamW without decay. Its weights are float32 and are exported as bfloat16.

    Args:
        checkpoint: first weights. The other files of this folder are copied to saved checkpoints.

    Attributes:
        tensors: exported tensors by their names in the checkpoint.
    """

    def __init__(self, checkpoint: Path, *, rate: float, seed: int = 1) -> None:
        self._checkpoint = checkpoint
        self._rate = rate
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = load_file(checkpoint / FILE)
        self._weights = {name: tensor.float().reshape(-1) for name, tensor in self.tensors.items()}
        self._moments = torch.zeros(BLOCK), torch.zeros(BLOCK)
        self._num_steps = 0

    def step(self) -> float:
        """Make a step. Return the percentage of exported elements with changed bits."""
        update = self._update() * self._rate
        num_changed = 0
        for number, (name, weights) in enumerate(self._weights.items()):
            for begin in range(0, len(weights), BLOCK // 2):
                part = weights[begin : begin + BLOCK // 2]
                place = (number * 7919 + begin) % (BLOCK // 2)
                part -= update[place : place + len(part)]
            exported = weights.bfloat16().reshape(self.tensors[name].shape)
            num_changed += int((exported.view(torch.int16) != self.tensors[name].view(torch.int16)).sum())
            self.tensors[name] = exported
        return 100 * num_changed / sum(len(weights) for weights in self._weights.values())

    def _update(self) -> torch.Tensor:
        """Return the values that AdamW subtracts, divided by the learning rate."""
        self._num_steps += 1
        gradient = torch.empty(BLOCK).normal_(0, GRADIENT_STD, generator=self._generator)
        means, squares = self._moments
        means.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
        squares.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        size = (squares / (1 - BETAS[1] ** self._num_steps)).sqrt_().add_(EPSILON)
        return means / (1 - BETAS[0] ** self._num_steps) / size

    def save(self, folder: Path) -> Path:
        """Write a whole checkpoint. Return its folder."""
        folder.mkdir(parents=True)
        save_file(self.tensors, folder / FILE, {"format": "pt"})
        for file in self._checkpoint.iterdir():
            if file.name != FILE:
                shutil.copy(file, folder / file.name)
        return folder


def model_bytes(checkpoint: Path) -> int:
    """Return the size of the file with all tensors."""
    return (checkpoint / FILE).stat().st_size
