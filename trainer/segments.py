"""Which sample each position of a micro-batch belongs to, and a mask that keeps attention within samples."""

import torch

from trainer.packing import MicroBatch

__all__ = ["attention_mask", "segment_indices"]


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


def attention_mask(batch: MicroBatch, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A causal mask under which no sample sees another, for models that do not read `position_ids` for that.

    It takes T * T entries, so prefer `MicroBatch.model_inputs`, or kernels that take `cu_seqlens`, where they serve.

    Args:
        batch: whose `cu_seqlens` say where samples begin.
        dtype: of the model. The mask is added to attention scores, which eager and sdpa attention both do; a boolean
            one would be added as zeros and ones by eager attention, and mask nothing.

    Returns:
        f[1, 1, T, T]: 0.0 where position [.., .., i, j] lets i see j, else the dtype's lowest number.
    """
    num_positions = batch.input_ids.shape[1]
    segments = segment_indices(batch.cu_seqlens, num_positions)
    seen = (segments[:, None] == segments[None, :]).tril()
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)[None, None]
