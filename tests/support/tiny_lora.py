"""A random LoRA adapter for a tiny dense model, in the format of Hugging Face's PEFT."""

import json
from pathlib import Path
from typing import Any

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
