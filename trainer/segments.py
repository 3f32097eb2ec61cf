"""Which sample each position of a micro-batch belongs to, whether a model keeps them apart, and a mask that does."""

from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_integer
from .errors import PackError
from .packing import MicroBatch

__all__ = ["attention_mask", "check_packing", "segment_indices"]


def segment_indices(cu_seqlens: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The number of the segment that each position lies in.

    Args:
        cu_seqlens: i32[n + 1], as `MicroBatch` has it.
        num_positions: T, its last entry, which is not read from it as that would wait for the device.

    Returns:
        i64[T]: 0 to n - 1, on the device of `cu_seqlens`.
    """
    positions = torch.arange(num_positions, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:-1].to(positions.dtype), right=True)


def attention_mask(
    batch: MicroBatch, *, dtype: torch.dtype = torch.float32, sliding_window: int | None = None
) -> torch.Tensor:
    """A causal mask under which no sample sees another, for models that do not read `position_ids` for that.

    It takes T * T entries, so prefer `MicroBatch.model_inputs`, or kernels that take `cu_seqlens`, where they serve.

    Args:
        batch: whose `cu_seqlens` say where samples begin.
        dtype: of the model. The mask is added to attention scores, which eager and sdpa attention both do; a boolean
            one would be added as zeros and ones by eager attention, and mask nothing.
        sliding_window: how many positions each sees, itself included: `config.sliding_window` for layers that have
            one. transformers takes the mask for all that a layer needs, and adds no window to it. None: all before.

    Returns:
        f[1, 1, T, T]: 0.0 where position [.., .., i, j] lets i see j, else the dtype's lowest number.

    Raises:
        PackError: `sliding_window` is no integer >= 1.
    """
    num_positions = batch.input_ids.shape[1]
    segments = segment_indices(batch.cu_seqlens, num_positions)
    seen = (segments[:, None] == segments[None, :]).tril_()
    if sliding_window is not None:
        seen = seen.triu_(1 - check_integer(PackError, "sliding_window", sliding_window, 1))
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)[None, None]


def check_packing(model: nn.Module, batch: MicroBatch, **inputs: Any) -> None:
    """Check that no sample of a micro-batch sees another in this model; once, before training, is enough.

    It computes how the last segment's logits change with each position's embedding: by exactly nothing where that is
    in another segment. This takes a forward pass, and a backward pass that leaves parameters alone.

    Args:
        model: of Hugging Face, not wrapped or compiled. Reentrant gradient checkpointing does not allow such a backward
            pass: call `model.eval()` before.
        batch: of two segments or more; padding is one.
        inputs: what the model is called with beside `batch.model_inputs()`, such as `attention_mask`.

    Raises:
        PackError: samples see each other, or there is one segment only.
    """
    num_positions = batch.input_ids.shape[1]
    segments = segment_indices(batch.cu_seqlens, num_positions)
    here = segments == len(batch.cu_seqlens) - 2
    if bool(here.all()):
        raise PackError("the micro-batch has one segment; allowed: two or more")
    embedded: list[Tensor] = []

    def on_embeddings(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()

    handle = model.get_input_embeddings().register_forward_hook(on_embeddings)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            logits = model(**(batch.model_inputs() | inputs)).logits[0, here]
            (gradient,) = torch.autograd.grad(logits.float().square().sum(), embedded)
    finally:
        handle.remove()
    seen = gradient[0].ne(0).any(dim=-1) & ~here
    if bool(seen.any()):
        raise PackError(
            f"in a {type(model).__name__} the last segment sees {int(seen.sum())} positions of segments before it; "
            "allowed: a mask that it heeds (attention_mask), or pack(..., max_samples=1)"
        )
