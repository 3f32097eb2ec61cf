"""Converts the chunks of a stream to the arrays of its result. Each array is allocated once and written once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import Chunk
from ....schemas.rows import DTYPES, Rows
from .token_masks import TokenMasks

__all__ = ["join_chunks"]


def join_chunks(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return the arrays of a `Generation` by their field names, writable and owned by the caller.

    The chunks must follow each other without a gap, as `rollbus.bus.protocol.stream.response_stream` delivers them.
    """
    sizes = [chunk.num_tokens for chunk in chunks]
    tops = [chunk.top_logprobs for chunk in chunks if chunk.top_logprobs is not None]
    prompts = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    prompt_tops = [prompt.top for prompt in prompts if prompt.top is not None]
    has_logprobs = any(chunk.logprobs_data is not None for chunk in chunks if chunk.num_tokens)
    return {
        "token_ids": _join([chunk.token_ids for chunk in chunks], "i4"),
        "logprobs": _join([chunk.logprobs for chunk in chunks if chunk.logprobs is not None], "f4")
        if has_logprobs
        else None,
        "weight_versions": np.repeat(np.array([chunk.weight_version for chunk in chunks], "i4"), sizes),
        "lora_versions": _join_lora_versions(chunks),
        "routed_experts": _join_rows(chunks),
        "top_token_ids": _join([top.token_ids for top in tops], "i4") if tops else None,
        "top_logprobs": _join([top.logprobs for top in tops], "f4") if tops else None,
        "prompt_logprobs": _join([prompt.logprobs for prompt in prompts], "f4") if prompts else None,
        "prompt_top_token_ids": _join([top.token_ids for top in prompt_tops], "i4") if prompt_tops else None,
        "prompt_top_logprobs": _join([top.logprobs for top in prompt_tops], "f4") if prompt_tops else None,
        "sampling_mask": TokenMasks.joined_of_all([chunk.sampling_mask for chunk in chunks if chunk.num_tokens]),
    }


def _join_lora_versions(chunks: Sequence[Chunk]) -> npt.NDArray[np.int32] | None:
    versions = [chunk.lora_version for chunk in chunks if chunk.num_tokens]
    if not versions or None in versions:
        return None
    return np.repeat(np.array(versions, "i4"), [chunk.num_tokens for chunk in chunks if chunk.num_tokens])


def _join_rows(chunks: Sequence[Chunk]) -> Rows | None:
    parts = [chunk.routed_experts for chunk in chunks if chunk.routed_experts is not None]
    if not parts:
        return None
    rows = np.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), DTYPES[parts[0].dtype])
    at = 0
    for part in parts:
        rows[at : at + part.shape[0]] = part.numpy()
        at += part.shape[0]
    return rows


def _join(parts: list[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
