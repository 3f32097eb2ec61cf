"""Converts vLLM's sampling masks to the wire format."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import SamplingMask

__all__ = ["VllmMask", "mask_of"]

VllmMask = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]] | None, Any]
"""vLLM's `SamplingMaskLists` (v1/outputs.py): all ids, the offset of each token's ids, and an unused field.
Without offsets, all ids belong to one token, as in every step of 0.30."""


def mask_of(mask: VllmMask | None, token_ids: Sequence[int], vocab_size: int) -> SamplingMask:
    """Return the mask for the tokens of one step.

    Raises:
        ValueError: the mask is missing, belongs to other tokens, or has ids outside of the vocabulary.
    """
    if mask is None:
        raise ValueError(f"no mask for {len(token_ids)} tokens")
    ids, offsets = np.asarray(mask[0]), mask[1]
    offsets = np.array([0, len(ids)]) if offsets is None else np.asarray(offsets)
    if len(offsets) != len(token_ids) + 1 or not 0 <= offsets[0] <= offsets[-1] <= len(ids):
        raise ValueError(f"mask of {len(offsets) - 1} tokens with {len(ids)} ids, for {len(token_ids)} tokens")
    ids = ids[offsets[0] : offsets[-1]]
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"ids from {ids.min()} to {ids.max()}; allowed: 0 to below {vocab_size}")
    counts = np.diff(offsets)
    found = SamplingMask(counts.astype("<i4").tobytes(), ids.astype("<i4").tobytes())
    for token_id, own in zip(token_ids, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        if token_id not in own:
            raise ValueError(f"token {token_id} is not among the {len(own)} ids of its mask")
    return found
