"""Updates what vLLM's own reload leaves old: tensors that a model copies itself, and copies of convolution weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

UNPACKED = "_cpu_unpacked_conv_weight"
"""The attribute with the original weight of a convolution that vLLM has packed."""
Copies = dict[Any, list[tuple[Any, str]]]
"""For each convolution, the buffers with a copy of its weight, as pairs of module and buffer name."""
LOADER = "online_process_loader"
"""Name of the function in which vLLM wraps the loaders of parameters during a reload."""


def find_copies(model: Any) -> Copies:
    """Return the buffers that equal the unpacked weight of a convolution in the same parent module.

    On a CPU with AVX512-BF16, vLLM packs the weight of a convolution of Mamba or linear attention (layers/utils.py:
    dispatch_cpu_unquantized_gemm). The mixer has a buffer that was a view of that weight
    (layers/mamba/mamba_mixer2.py: conv_weights). After the packing, the buffer has separate memory, and vLLM does not
    update it when it loads new weights.
    """
    copies: Copies = {}
    for parent in model.modules():
        for convolution in parent.children():
            unpacked: Any = getattr(convolution, UNPACKED, None)
            if unpacked is None:
                continue
            for name, buffer in parent.named_buffers(recurse=False):
                if buffer.shape == unpacked.shape and torch.equal(buffer, unpacked):
                    copies.setdefault(convolution, []).append((parent, name))
    return copies


def copy_unpacked(copies: Copies) -> None:
    """Copy the unpacked weight of each convolution into its buffers."""
    for convolution, buffers in copies.items():
        for parent, name in buffers:
            parent._buffers[name].data.copy_(getattr(convolution, UNPACKED))


class DirectCopies(TorchFunctionMode):
    """Inside `with`, passes copies into parameters without memory to vLLM's loaders.

    During a reload, the parameters of a vLLM model have no memory. Their loaders collect the tensors of a module until
    they are complete (model_loader/reload/layerwise.py). gpt-oss copies its experts and attention sinks directly
    (models/gpt_oss.py: _load_weights_other), so a reload loses them: vLLM reports success, but the module has the old
    weights. This turns each direct copy into a call of a loader, so that vLLM collects its tensor too.

    Args:
        model: a model of vLLM.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._owners: dict[int, tuple[Any, str]] | None = None
        """Module and name of each parameter without memory, by the address of its placeholder storage."""
        self._num_counting = 0
        self._count: Any = None

    def __enter__(self) -> "DirectCopies":
        """Begin to pass on copies, except those with which vLLM counts the elements that a loader loads."""
        self._count = layerwise.get_numel_loaded
        layerwise.get_numel_loaded = self._count_numbers
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop passing on copies."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        layerwise.get_numel_loaded = self._count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass on a `target.copy_(source)`, and call every other function. torch calls this for every function."""
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
        """Pass `source` to vLLM and return True if `target` is (a part of) a parameter that needs tensors."""
        layer, name = self._owner(target)
        if layer is None:
            return False
        info, parameter = get_layerwise_info(layer), layer._parameters[name]
        if not info.can_load():
            return False
        if loader_of(parameter) is not _copy_part:
            if not parameter.is_contiguous() or any(loaded == name for loaded, _ in info.loaded_weights):
                # vLLM would load the earlier tensors with the new loader, but they need the parameter's own loader.
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
        # A module with all its tensors has new parameters, and another parameter may reuse the old placeholder.
        if parameter is None or not parameter.is_meta or _memory(parameter) != _memory(target):
            return None, ""
        return layer, name


def loader_of(parameter: Any) -> Callable[..., Any]:
    """Return the loader of a parameter without vLLM's wrappers."""
    loader: Any = getattr(parameter, "weight_loader", default_weight_loader)
    while loader.__name__ == LOADER:
        loader = loader.__wrapped__
    return loader  # type: ignore[no-any-return]


def _copy_part(param: Tensor, loaded_weight: Tensor, part: tuple[torch.Size, tuple[int, ...], int]) -> None:
    """Copy into a part of `param`. This is a loader; vLLM calls it with a `param` in other memory than the target."""
    size, stride, offset = part
    param.data.as_strided(size, stride, offset).copy_(loaded_weight.expand(size))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
