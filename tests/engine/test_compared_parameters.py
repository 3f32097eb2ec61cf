"""The comparison of a model's parameters with the tensors of a checkpoint, without an engine."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from rollbus.workers.engines.vllm.reload import compare_parameters


def test_nan_in_a_checkpoint_is_told_from_a_parameter_that_was_not_loaded(tmp_path: Path) -> None:
    """A parameter with NaN in the files is reported as such, and not as one that was not loaded."""
    layers = {name: torch.nn.Linear(2, 2, bias=False) for name in ("same", "nan", "other")}
    model = torch.nn.ModuleDict(layers)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors["nan.weight"][0, 0] = torch.nan
    tensors["other.weight"] += 1
    layers["nan"].weight.data.copy_(tensors["nan.weight"])
    save_file(tensors, tmp_path / "model.safetensors")

    assert compare_parameters(model, tmp_path) == ({"same.weight"}, {"nan.weight"})
