"""Tensors that a model copies into its parameters by itself, and not with the loaders of these parameters.

While vLLM loads a model again, its parameters have no memory, and their loaders keep the tensors until all those of a
module have come (model_loader/reload/layerwise.py). What gpt-oss copies by itself, its experts and attention sinks
(models/gpt_oss.py: _load_weights_other), is lost: vLLM says that all is loaded, and the module keeps the weights of
before. `DirectCopies` turns this copy into a call of a loader, so that vLLM treats it like any other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader

__all__ = ["DirectCopies", "loader_of"]

LOADER = "online_process_loader"
"""The name of what vLLM puts around the loaders of parameters while it loads again."""


class DirectCopies(TorchFunctionMode):
    """Hands copies into parameters without memory to vLLM's loaders, as long as it is entered.

    Args:
        model: of vLLM.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._owners: dict[int, tuple[Any, str]] | None = None
        """The module and the name of each parameter without memory, by what stands for that memory."""
        self._num_counting = 0
        self._count: Any = None

    def __enter__(self) -> "DirectCopies":
        """Begin; vLLM's own copies, by which it counts what a loader loads, stay as they are."""
        self._count = layerwise.get_numel_loaded
        layerwise.get_numel_loaded = self._count_numbers
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        layerwise.get_numel_loaded = self._count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stand in for all functions of torch; only `target.copy_(source)` may be different."""
        if func is Tensor.copy_ and args[0].is_meta and not self._num_counting:
            target, source = args[0], args[1] if len(args) > 1 else (kwargs or {})["src"]
            if not source.is_meta and self._hand_over(target, source):
                return target
        return func(*args, **kwargs or {})

    def _count_numbers(self, weight_loader: Callable[..., Any], args: Any) -> Any:
        self._num_counting += 1
        try:
            return self._count(weight_loader, args)
        finally:
            self._num_counting -= 1

    def _hand_over(self, target: Tensor, source: Tensor) -> bool:
        """Give `source` to vLLM, if `target` is a parameter that waits for tensors, or a part of one."""
        layer, name = self._owner(target)
        if layer is None:
            return False
        info, parameter = get_layerwise_info(layer), layer._parameters[name]
        if not info.can_load():
            return False
        if loader_of(parameter) is not _copy_part:
            if not parameter.is_contiguous() or any(loaded == name for loaded, _ in info.loaded_weights):
                # The parameter's own loader would be asked for what has come before.
                return False
            parameter.weight_loader = _copy_part
            parameter.weight_loader = make_online_process_loader(layer, name)
        parameter.weight_loader(parameter, source, (target.size(), target.stride(), target.storage_offset()))
        return True

    def _owner(self, target: Tensor) -> tuple[Any, str]:
        if self._owners is None:
            self._owners = {
                _memory(parameter): (layer, name)
                for layer in self._model.modules()
                for name, parameter in layer._parameters.items()
                if parameter is not None and parameter.is_meta
            }
        layer, name = self._owners.get(_memory(target), (None, ""))
        parameter = None if layer is None else layer._parameters.get(name)
        # A module that has its tensors has other parameters, and what stood for their memory may stand for another's.
        if parameter is None or not parameter.is_meta or _memory(parameter) != _memory(target):
            return None, ""
        return layer, name


def loader_of(parameter: Any) -> Callable[..., Any]:
    """Return the loader of a parameter, without what vLLM puts around it."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Any = getattr(parameter, "weight_loader", default_weight_loader)
    while loader.__name__ == LOADER:
        loader = loader.__wrapped__
    return loader  # type: ignore[no-any-return]


def _copy_part(param: Tensor, loaded_weight: Tensor, part: tuple[torch.Size, tuple[int, ...], int]) -> None:
    """Copy into a part of `param`, as a loader; vLLM calls it with other memory than `part` was found in."""
    size, stride, offset = part
    param.data.as_strided(size, stride, offset).copy_(loaded_weight.expand(size))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
