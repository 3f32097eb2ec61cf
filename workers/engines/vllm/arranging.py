"""Arranges the tensors that were received for a module as its parameters, in memory separate from vLLM's.

vLLM arranges the same tensors in the module's own memory. Both call the loaders of the parameters. Later changes by
vLLM to its copy do not affect the parameters that `arrange` returns.
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
    """Return the raw parameters of `layer`, and the number of elements without a value, both by parameter name.

    The parameters contain the tensors that were received for `layer`. Do not write to them: a parameter that equals one
    received tensor without a change is that tensor itself. Other parameters have separate memory. Elements without a
    value are 0. The second map has only parameters with at least one such element.
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
            # NaN marks an element without a value only if no received tensor contains NaN.
            if _has_nan(raw[name]) and not any(_has_nan(tensor) for tensor in tensors if not tensor.is_meta):
                absent[name] = int(raw[name].isnan().sum())
                raw[name].nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return raw, absent


def _filled(like: Any, loads: list[Any], device: Any) -> Tensor:
    """Return a parameter like `like` in new memory, filled by its loader.

    Elements that the loader does not write are NaN, or 0 if the dtype has no NaN.
    """
    fill = math.nan if _can_be_nan(like) else 0
    parameter = _as(like, torch.full(tuple(like.shape), fill, dtype=like.dtype, device=device))
    for arguments in loads:
        _load(like, parameter, arguments)
    arranged: Tensor = parameter.data
    return arranged


def _whole(like: Any, loads: list[Any], device: Any) -> Tensor | None:
    """Return the received tensor that equals the whole parameter; None: several tensors, or the loader changes it."""
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
    """Records the writes into tensors without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []
        """Target and source of each copy."""
        self.has_others = False
        """True if an operation other than a copy wrote to a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record the write of a torch function, then call the function. torch calls this for each of its functions."""
        target = args[0] if args else None
        # Loaders also fill the part beyond the end of a tensor. That part may be empty; ignore writes to it.
        is_nothing = isinstance(target, Tensor) and not target.numel()
        if func._schema.is_mutable and not is_nothing:
            if func is torch.ops.aten.copy_.default:
                self.copies.append((args[0], args[1]))
            else:
                self.has_others = True
        return func(*args, **kwargs or {})


def _as(like: Any, tensor: Any) -> Any:
    """Give `tensor` the class and the attributes of the parameter `like`, because loaders read them."""
    tensor.__class__ = like.__class__
    tensor.__dict__ = like.__dict__.copy()
    return tensor


def _load(like: Any, parameter: Any, arguments: Any) -> None:
    """Call the loader of `like` with the recorded `arguments`, but with `parameter` as its target."""
    bound = copy.copy(arguments)
    bound.arguments = {**arguments.arguments, "param": parameter}
    loader_of(like)(*bound.args, **bound.kwargs)


def _has_nan(tensor: Tensor) -> bool:
    # The sum is NaN if any element is NaN. It takes a twentieth of the time of a check of each element. A sum of
    # infinities can be NaN too, so confirm it.
    return _can_be_nan(tensor) and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1
