"""The effective weights of a model with a LoRA adapter of PEFT: the sum of base weights and adapter.

PEFT's `merge_adapter` and `unmerge_adapter` would round the trainer's frozen weights with each version. This module
does not change them.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from ...schemas.errors import InvalidRequest

__all__ = ["merged_state"]


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the model inside a `PeftModel`, under its own names. Adapted weights are new tensors.

    Raises:
        InvalidRequest: there is not exactly one active adapter, or it is not plain LoRA of linear layers.
    """
    adapters, whole = model.active_adapters, model.get_base_model()
    if len(adapters) != 1:
        raise InvalidRequest(field="model", problem=f"has {len(adapters)} active PEFT adapters", allowed="one")
    [adapter] = adapters
    layers: dict[str, Any] = {}
    for name, module in whole.named_modules():
        if isinstance(module, BaseTunerLayer):
            _check_plain(name, module, adapter)
            layers[f"{name}.base_layer.weight"] = module
    state: dict[str, torch.Tensor] = {}
    for name, tensor in whole.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        own = name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")
        has_delta = name in layers and adapter in layers[name].lora_A
        state[own] = tensor + layers[name].get_delta_weight(adapter).detach() if has_delta else tensor
    return state


def _check_plain(name: str, layer: Any, adapter: str) -> None:
    """Reject an adapter that is more than a product of two matrices added to a weight."""
    if type(layer) is not Linear or adapter in layer.lora_variant or layer.lora_bias.get(adapter):
        problem = f"has a PEFT adapter of another kind at {name}"
        raise InvalidRequest(field="model", problem=problem, allowed="LoRA of linear layers, without DoRA and biases")
