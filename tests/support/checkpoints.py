"""Small checkpoints and adapters, which tests write byte by byte because safetensors files need no torch."""

import json
import math
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

MODEL: Shapes = {
    "model.embed_tokens.weight": (16, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 8),
    "model.layers.0.self_attn.q_proj.weight": (6, 4),
    "model.norm.weight": (4,),
}
"""The tensors of an invented model."""
BYTES = {"F32": 4, "BF16": 2, "I8": 1}


def write_safetensors(path: Path, shapes: Shapes, *, dtype: str = "F32", fill: int = 0) -> Path:
    """Write tensors in which each byte is `fill`; return `path`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes([fill]) * end)
    return path


def write_checkpoint(folder: Path, shapes: Shapes = MODEL, *, dtype: str = "F32", fill: int = 0) -> Path:
    """Write a checkpoint with one safetensors file; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "none", "rope_theta": 10000.0}))
    write_safetensors(folder / "model.safetensors", shapes, dtype=dtype, fill=fill)
    return folder


def write_sharded(folder: Path, shapes: Shapes = MODEL) -> Path:
    """Write a checkpoint with two shards and an index; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for i, half in enumerate((names[:2], names[2:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        write_safetensors(folder / file, {name: shapes[name] for name in half})
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_adapter(folder: Path, *, rank: int = 2, shapes: Shapes | None = None, **config: Any) -> Path:
    """Write a LoRA adapter for `q_proj` of `MODEL`; return its folder.

    Args:
        shapes: tensors in place of the adapter's own.
        config: fields that replace fields of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    pair: Shapes = {f"{module}.lora_A.weight": (rank, 4), f"{module}.lora_B.weight": (6, rank)}
    write_safetensors(folder / "adapter_model.safetensors", pair if shapes is None else shapes)
    return folder


def ignore(_stage: str) -> None:
    """Ignore a report about the stage of a transfer."""


# A random LoRA adapter for a tiny dense model, in the format of Hugging Face's PEFT.


RANK = 4
ALPHA = 16
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def make_tiny_lora(path: Path, model: Path, *, seed: int) -> Path:
    """Make an adapter with two random factors in the folder `path` for the checkpoint `model`; return `path`.

    The same arguments make the same adapter.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in _targets(model).items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.1
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.split(".")[-1] for module in MODULES}),
    }
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merge_tiny_lora(model: Any, path: Path) -> None:
    """Add the adapter in `path` to the weights of `model`, a transformers model."""
    from safetensors.torch import load_file

    tensors = load_file(path / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in tensors:
            parameter.data += tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"] * (ALPHA / RANK)


def _targets(model: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.removesuffix(".weight").endswith(MODULES)]  # noqa: SIM118
        return {name: tensors.get_slice(name).get_shape() for name in names}
