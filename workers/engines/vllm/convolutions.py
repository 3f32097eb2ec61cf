"""Updates and compares copies of convolution weights in other modules (layers of Mamba and linear attention).

On a CPU with AVX512-BF16, vLLM packs the weight of a convolution (layers/utils.py: dispatch_cpu_unquantized_gemm). The
mixer has a buffer that was a view of that weight (layers/mamba/mamba_mixer2.py: conv_weights). After the packing, the
buffer has separate memory, and vLLM does not update it when it loads new weights.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["UNPACKED", "check_convolution", "copy_unpacked", "find_copies"]

UNPACKED = "_cpu_unpacked_conv_weight"
"""The attribute with the original weight of a convolution that vLLM has packed."""
NUM_DIMENSIONS = 3
"""Number of dimensions of a convolution's weight: `[channel, 1, width]`."""
Copies = dict[Any, list[tuple[Any, str]]]
"""For each convolution, the buffers with a copy of its weight, as pairs of module and buffer name."""


def find_copies(model: Any) -> Copies:
    """Return the buffers that equal the unpacked weight of a convolution in the same parent module."""
    import torch

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


def check_convolution(
    module: Any, raw: dict[str, Any], buffers: list[tuple[Any, str]]
) -> Callable[[], str | None] | None:
    """Return a function that compares the weights that kernels read with the loaded weights.

    None: `module` is not a convolution. The function returns a description of the first difference, or None.
    """
    import torch

    from .probes import plain_difference

    weight = raw.get("weight")
    if weight is None or weight.dim() != NUM_DIMENSIONS or weight.shape[1] != 1:
        return None
    # Copy: the loaded tensors may be memory of the sender, which writes the next weights to it.
    expected = weight.reshape(weight.shape[0], weight.shape[2]).clone()
    bias = raw["bias"].clone() if isinstance(raw.get("bias"), torch.Tensor) else None

    def run() -> str | None:
        from vllm import _custom_ops

        read = {f"its copy {name}": (parent._buffers[name], expected) for parent, name in buffers}
        if hasattr(module, UNPACKED):
            read["its unpacked weight"] = getattr(module, UNPACKED), expected
            packed = _custom_ops.causal_conv1d_weight_pack(expected)
            read["its packed weight"] = module.weight.data.flatten(), packed.flatten()
        else:
            read["its weight"] = module.weight.data.reshape(expected.shape), expected
        if bias is not None:
            read["its bias"] = module.bias.data, bias
        differences = ((what, plain_difference(actual, given)) for what, (actual, given) in read.items())
        return next((f"{what} {difference}" for what, difference in differences if difference is not None), None)

    return run
