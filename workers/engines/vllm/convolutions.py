"""Weights of convolutions, which a module reads from copies of its own (layers of Mamba, linear attention).

On a CPU with AVX512-BF16, vLLM packs the weight of a convolution (layers/utils.py: dispatch_cpu_unquantized_gemm). A
buffer of the mixer that was a view of that weight (layers/mamba/mamba_mixer2.py: conv_weights) then has memory of its
own, and vLLM leaves it as it was when it loads new weights.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["UNPACKED", "check_convolution", "copy_unpacked", "find_copies"]

UNPACKED = "_cpu_unpacked_conv_weight"
"""The attribute in which vLLM keeps the weight of a convolution that it has packed."""
NUM_DIMENSIONS = 3
"""Of a convolution's weight: `[channel, 1, width]`."""
Copies = dict[Any, list[tuple[Any, str]]]
"""By convolution, the buffers that hold its weight: the module that has the buffer, and its name."""


def find_copies(model: Any) -> Copies:
    """Return the buffers that hold the unpacked weight of a convolution beside them."""
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
    """Bring the buffers up to date with their convolutions."""
    for convolution, buffers in copies.items():
        for parent, name in buffers:
            parent._buffers[name].data.copy_(getattr(convolution, UNPACKED))


def check_convolution(
    module: Any, raw: dict[str, Any], buffers: list[tuple[Any, str]]
) -> Callable[[], str | None] | None:
    """Return the comparison of what kernels read with what was loaded; None: `module` is no convolution."""
    import torch

    from .probes import plain_difference

    weight = raw.get("weight")
    if weight is None or weight.dim() != NUM_DIMENSIONS or weight.shape[1] != 1:
        return None
    # Copies: what was loaded may be memory of the sender, who writes the next weights to it.
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
