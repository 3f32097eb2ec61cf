"""Finds a model's routers, and checks that rows of routed experts fit them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ReplayError
from .formulas import TRANSFORMERS, Formula, formula_of

__all__ = ["Router", "check_rows", "find_routers", "layer_of_rows"]

_ROW_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SUPPORTED = f"allowed: the routers of transformers >= {TRANSFORMERS} in rollbus.trainer.replay.SUPPORTED"


@dataclass(frozen=True, slots=True)
class Router:
    """A router and its place in the model."""

    name: str
    """Path in the model, for example `model.layers.3.mlp.gate`."""
    module: nn.Module
    formula: Formula
    layer: int
    """Index among all hidden layers, with or without experts."""
    num_hidden_layers: int
    top_k: int
    num_experts: int


def find_routers(model: nn.Module) -> list[Router]:
    """Return the model's routers, sorted by layer.

    Raises:
        ReplayError: there is no router, a router is of an unknown kind, or there is not one router for each layer of
            one stack.
    """
    modules = dict(model.named_modules())
    routers: list[Router] = []
    stacks: set[str] = set()
    for name, module in modules.items():
        formula = formula_of(type(module))
        if formula is None:
            if type(module).__name__.endswith("Router"):
                raise ReplayError(f"{name} is a {type(module).__name__}, which cannot be replayed; {_SUPPORTED}")
            continue
        parts = name.split(".")
        prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
        stack = next((prefix for prefix in prefixes if isinstance(modules[prefix], nn.ModuleList)), None)
        if stack is None:
            raise ReplayError(f"{name} is in no nn.ModuleList of layers; a model as transformers builds it is needed")
        stacks.add(stack)
        top_k, num_experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
        if not isinstance(top_k, int) or not isinstance(num_experts, int):
            raise ReplayError(f"{name} has no integers top_k and num_experts; transformers >= {TRANSFORMERS} is needed")
        layer, num_hidden_layers = int(parts[stack.count(".") + 1]), len(list(modules[stack].children()))
        routers.append(Router(name, module, formula, layer, num_hidden_layers, top_k, num_experts))
    if not routers:
        raise ReplayError(f"{type(model).__name__} has no router that can be replayed; {_SUPPORTED}")
    if len({(router.top_k, router.num_experts) for router in routers}) > 1:
        raise ReplayError("the model's routers differ in top_k or in the number of experts; rows have one layout")
    layers_seen = [router.layer for router in routers]
    if len(stacks) > 1 or len(set(layers_seen)) < len(layers_seen):
        names = ", ".join(router.name for router in routers)
        raise ReplayError(f"rows have one layer for each of one stack of layers; the model has the routers {names}")
    return sorted(routers, key=lambda router: router.layer)


def layer_of_rows(routers: list[Router], num_layers: int) -> list[int]:
    """Return for each router its index among the `num_layers` layers of a row.

    vLLM's rows have every hidden layer, with zeros for layers without experts. Rows with only the layers that have
    experts are accepted too.

    Raises:
        ReplayError: `num_layers` matches neither form.
    """
    num_hidden_layers = routers[0].num_hidden_layers
    if num_layers == num_hidden_layers:
        return [router.layer for router in routers]
    if num_layers == len(routers):
        return list(range(len(routers)))
    raise ReplayError(
        f"rows have {num_layers} layers, the model has {num_hidden_layers}, of which {len(routers)} have experts"
    )


def check_rows(routed_experts: Tensor, routers: list[Router]) -> None:
    """Check rows i[B, T, L, K] against the model's routers. Layers without experts are not checked.

    Raises:
        ReplayError: the rows are wrong. The message gives the first place. A row that repeats an expert is wrong:
            otherwise zeros of missing rows would pass as expert 0.
    """
    given: object = routed_experts
    if not isinstance(given, Tensor) or given.ndim != 4 or given.dtype not in _ROW_DTYPES:
        found = f"a {type(given).__module__}.{type(given).__qualname__}"
        if hasattr(given, "dtype") and hasattr(given, "shape"):
            found += f" {list(given.shape)} of {given.dtype}"
        dtypes = ", ".join(str(dtype) for dtype in _ROW_DTYPES)
        raise ReplayError(f"routed experts are {found}; allowed: a tensor [batch, tokens, layers, top_k] of {dtypes}")
    layers = layer_of_rows(routers, routed_experts.shape[2])
    if routed_experts.shape[3] != routers[0].top_k:
        raise ReplayError(
            f"rows have {routed_experts.shape[3]} experts a layer; the model's top_k is {routers[0].top_k}"
        )
    if routed_experts.numel() == 0:
        return
    with_experts = routed_experts
    if len(layers) < routed_experts.shape[2]:
        with_experts = routed_experts.index_select(2, torch.tensor(layers, device=routed_experts.device))
    # One plane [B, T, L] for each of the top-k is a hundred times faster than sorting or reducing a short last axis.
    planes = with_experts.movedim(-1, 0).contiguous()
    lowest, highest = planes.amin(dim=0).long(), planes.amax(dim=0).long()
    own_choice = highest < 0
    repeats = torch.zeros_like(own_choice)
    for i, plane in enumerate(planes):
        for earlier in planes[:i]:
            repeats |= plane == earlier
    num_experts = routers[0].num_experts
    for wrong, allowed in (
        ((lowest < -1) | (highest >= num_experts), f"0 to {num_experts - 1}, or -1 for the router's own choice"),
        ((lowest < 0) & ~own_choice, "-1 for all of a row's experts, or for none"),
        (repeats & ~own_choice, "different experts"),
    ):
        if bool(wrong.any()):
            sequence, position, layer = wrong.nonzero()[0].cpu().numpy()
            ids = with_experts[sequence, position, layer].cpu().numpy()
            place = f"sequence {sequence}, position {position}, {routers[layer].name}"
            raise ReplayError(f"{place}: experts {ids}; allowed: {allowed}")
