"""The segments of a micro-batch, a check that a model separates them, and a mask that separates them."""

from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_integer
from .errors import PackError
from .packing import MicroBatch

__all__ = ["attention_mask", "check_packing", "segment_indices"]


def segment_indices(cu_seqlens: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Return the index of the segment of each position.

    Args:
        cu_seqlens: i32[n + 1], as in `MicroBatch`.
        num_positions: T, the last entry of `cu_seqlens`. Reading it from the tensor would wait for the device.

    Returns:
        i64[T]: 0 to n - 1, on the device of `cu_seqlens`.
    """
    positions = torch.arange(num_positions, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:-1].to(positions.dtype), right=True)


def attention_mask(
    batch: MicroBatch, *, dtype: torch.dtype = torch.float32, sliding_window: int | None = None
) -> torch.Tensor:
    """Return a causal mask that separates samples, for models that do not separate them by `position_ids`.

    The mask has T * T entries. If possible, use `MicroBatch.model_inputs`, or kernels that take `cu_seqlens`.

    Args:
        batch: micro-batch with the sample boundaries in `cu_seqlens`.
        dtype: dtype of the model (default: float32). Eager and sdpa attention add the mask to the attention scores. A
            boolean mask would mask nothing: eager attention would add zeros and ones.
        sliding_window: number of positions that each position sees, including itself: `config.sliding_window` for
            layers with a window. transformers adds no window to a given mask. None (default): all earlier positions.

    Returns:
        f[1, 1, T, T]: 0.0 where position [.., .., i, j] lets i see j, else the lowest number of the dtype.

    Raises:
        PackError: `sliding_window` is not an integer of at least 1.
    """
    num_positions = batch.input_ids.shape[1]
    segments = segment_indices(batch.cu_seqlens, num_positions)
    seen = (segments[:, None] == segments[None, :]).tril_()
    if sliding_window is not None:
        seen = seen.triu_(1 - check_integer(PackError, "sliding_window", sliding_window, 1))
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)[None, None]


def check_packing(model: nn.Module, batch: MicroBatch, **inputs: Any) -> None:
    """Check that no sample of a micro-batch affects another in this model. Once before training is enough.

    The check computes the gradient of the last segment's logits with respect to the embedding of each position. It must
    be exactly zero for positions of other segments. This takes a forward pass, and a backward pass that does not change
    the gradients of parameters.

    Args:
        model: Hugging Face model, not wrapped or compiled. Reentrant gradient checkpointing does not permit such a
            backward pass: call `model.eval()` first.
        batch: micro-batch with at least two segments. Padding is a segment.
        inputs: arguments of the model besides `batch.model_inputs()`, such as `attention_mask`.

    Raises:
        PackError: samples affect each other, or there is only one segment.
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
            "allowed: a mask that the model uses (attention_mask), or pack(..., max_samples=1)"
        )
