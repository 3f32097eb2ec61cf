"""The tensors of a transformers model, named as in its checkpoint and as `save_pretrained` writes them.

Transformers 5 stores some weights differently in memory than in the checkpoint. For example, the experts of a layer are
one tensor. The names of `state_dict()` are therefore not the names that workers know. This module imports transformers;
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


def checkpoint_tensors(
    model: Any,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a transformers model as (name, tensor), named as in its checkpoint.

    The tensors equal the output of `model.save_pretrained` bit for bit. Of tied weights, only one is included. Tensors
    share the model's memory if the conversion allows it, so they must not change while they are used.

    Args:
        model: a `PreTrainedModel` that is whole in this process.
        checkpoint: folder of the checkpoint with which training began. The names are compared with it first. None: no
            comparison.
        state: tensors of the model by their own names. None: `model.state_dict()`.

    Raises:
        CheckpointMismatch: a tensor is a slice, or a name is missing in the checkpoint or in the model. The message
            gives the first such name.
    """
    whole: dict[str, torch.Tensor] = dict(model.state_dict() if state is None else state)
    for name in model._keys_to_ignore_on_save or ():  # as `save_pretrained` does
        whole.pop(name, None)
    for name, tensor in whole.items():
        if hasattr(tensor, "device_mesh") or tensor.is_meta:
            raise CheckpointMismatch(f"{name} is a slice, or not in this process; gather it first")
    tensors = revert_weight_conversion(model, remove_tied_weights_from_state_dict(dict(whole), model))
    if checkpoint is not None:
        names = _read_names(Path(checkpoint))
        # Some checkpoints contain a tied weight under both of its names.
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
