"""Arrange the tensors that came for a module as its parameters, beside vLLM, which does it in memory of the module.

Both call the loaders of the parameters. What vLLM does with its own copy afterwards does not reach what is here.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .direct_copies import loader_of

__all__ = ["arrange"]


def arrange(layer: Any, info: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the raw parameters of `layer` with the tensors that have come for it; not to be written to.

    A parameter that is one of these tensors, unchanged, is that tensor itself; others have memory of their own.
    Beside them, by parameter, how many of its elements got no value; they are 0 then.
    """
    given: dict[str, list[Any]] = {}
    for name, arguments in info.loaded_weights:
        given.setdefault(name, []).append(arguments)
    raw: dict[str, Tensor] = {}
    absent: dict[str, int] = {}
    with torch.no_grad():
        for name, loads in given.items():
            like = getattr(layer, name)
            whole = _whole(like, loads, info.restore_device)
            if whole is not None:
                raw[name] = whole
                continue
            raw[name] = _filled(like, loads, info.restore_device)
            tensors = [value for load in loads for value in load.arguments.values() if isinstance(value, Tensor)]
            # Where NaN came, it says nothing.
            if _has_nan(raw[name]) and not any(_has_nan(tensor) for tensor in tensors if not tensor.is_meta):
                absent[name] = int(raw[name].isnan().sum())
                raw[name].nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return raw, absent


def _filled(like: Any, loads: list[Any], device: Any) -> Tensor:
    """Return a parameter like `like` in new memory, with what its loader puts there; the rest is NaN if it can be."""
    fill = math.nan if _can_be_nan(like) else 0
    parameter = _as(like, torch.full(tuple(like.shape), fill, dtype=like.dtype, device=device))
    for arguments in loads:
        _load(like, parameter, arguments)
    arranged: Tensor = parameter.data
    return arranged


def _whole(like: Any, loads: list[Any], device: Any) -> Tensor | None:
    """Return the one tensor that is the parameter, as it is; None: there are several, or its loader changes it."""
    if len(loads) != 1:
        return None
    parameter = _as(like, torch.empty(tuple(like.shape), dtype=like.dtype, device="meta"))
    with _Writes() as writes:
        _load(like, parameter, loads[0])
    if len(writes.copies) != 1 or writes.has_others:
        return None
    target, source = writes.copies[0]
    is_all = target.untyped_storage()._cdata == parameter.untyped_storage()._cdata
    is_all &= (target.shape, target.stride(), target.storage_offset()) == (like.shape, parameter.stride(), 0)
    is_same = source.device.type == torch.device(device).type
    is_same &= (source.shape, source.dtype) == (like.shape, like.dtype)
    return source if is_all and is_same else None


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is written into tensors without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []
        """Targets and sources."""
        self.has_others = False
        """Something was written that is no copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Stand in for all functions of torch."""
        target = args[0] if args else None
        # Loaders also fill what is beyond the end of a tensor, which may be nothing.
        is_nothing = isinstance(target, Tensor) and not target.numel()
        if func._schema.is_mutable and not is_nothing:
            if func is torch.ops.aten.copy_.default:
                self.copies.append((args[0], args[1]))
            else:
                self.has_others = True
        return func(*args, **kwargs or {})


def _as(like: Any, tensor: Any) -> Any:
    """Make `tensor` a parameter like `like`, which loaders look at."""
    tensor.__class__ = like.__class__
    tensor.__dict__ = like.__dict__.copy()
    return tensor


def _load(like: Any, parameter: Any, arguments: Any) -> None:
    """Have the loader of `like` load into `parameter` what it was called with."""
    bound = copy.copy(arguments)
    bound.arguments = {**arguments.arguments, "param": parameter}
    loader_of(like)(*bound.args, **bound.kwargs)


def _has_nan(tensor: Tensor) -> bool:
    # A sum, which is NaN if any element is, takes a twentieth of the time that looking at each element takes.
    return _can_be_nan(tensor) and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1
