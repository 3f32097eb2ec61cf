"""A transformers model's tensors under the names of its checkpoint, as `save_pretrained` would write them.

Transformers 5 keeps some weights in another form in memory than in the checkpoint: the experts of a layer are one
tensor, for example. So the names of `state_dict()` are not those that workers know. This module imports transformers;
`import rollbus.trainer` does not import it.
"""

import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from .errors import CheckpointMismatch

__all__ = ["checkpoint_tensors"]


def checkpoint_tensors(
    model: Any,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a transformers model as (name, tensor) in the names of its checkpoint.

    They are what `model.save_pretrained` writes, bit for bit; of tied weights each is there once. Tensors share the
    model's memory where the conversion allows it: they must not change while they are used.

    Args:
        model: a `PreTrainedModel`, whole on this process.
        checkpoint: folder of the checkpoint with which training began; its names are compared first.
        state: the model's tensors by its own names; None: `model.state_dict()`.

    Raises:
        CheckpointMismatch: a tensor is a slice, or a name is not in the checkpoint, or missing; the message names the
            first one.
    """
    whole: dict[str, torch.Tensor] = dict(model.state_dict() if state is None else state)
    for name in model._keys_to_ignore_on_save or ():  # as `save_pretrained` does
        whole.pop(name, None)
    for name, tensor in whole.items():
        if hasattr(tensor, "device_mesh") or tensor.is_meta:
            raise CheckpointMismatch(f"{name} is a slice, or not in this process: gather first")
    tensors = revert_weight_conversion(model, remove_tied_weights_from_state_dict(dict(whole), model))
    if checkpoint is not None:
        names = _read_names(Path(checkpoint))
        # Some checkpoints have a tied weight under both of its names.
        tensors |= {name: whole[name] for name in names - tensors.keys() if name in whole}
        _check_names(tensors.keys(), names, checkpoint)
    yield from tensors.items()


def _read_names(folder: Path) -> Set[str]:
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    if not names:
        raise CheckpointMismatch(f"{folder} has no safetensors files; expected: the folder of a checkpoint")
    return names


def _check_names(found: Set[str], expected: Set[str], checkpoint: object) -> None:
    if unknown := sorted(found - expected):
        raise CheckpointMismatch(f"the model has {unknown[0]}, which is not in {checkpoint}")
    if missing := sorted(expected - found):
        raise CheckpointMismatch(f"{checkpoint} has {missing[0]}, which the model does not have")
