"""Compares the output of a worker with what the worker announced: the size of its vocabulary, and its versions."""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from ....schemas.chunk import Chunk
from ....schemas.limits import MAX_TOKEN_ID
from ....schemas.presence import WorkerPresence

__all__ = ["Announced", "announced_by", "are_within", "problem_of"]

FEW_BYTES: Final = 64
"""Bytes of ids up to which `struct` is faster than numpy: a frame of one step of a few requests."""
_U4: Final = np.dtype("<u4")


class Announced(NamedTuple):
    """The limits of a chunk."""

    vocab_size: int
    """Token ids are below it."""
    weight_version: int
    lora_version: int
    """The version of the adapter of the request; 0: it has none."""


def announced_by(workers: Iterable[WorkerPresence], lora: str | None = None) -> Announced:
    """Return what any of these workers announced. If none announced a vocabulary, each valid id is below it.

    Args:
        lora: the adapter of the request; None: the base model.
    """
    known = list(workers)
    return Announced(
        max(
            (each.capabilities.vocab_size for each in known if each.capabilities is not None), default=MAX_TOKEN_ID + 1
        ),
        max((each.weight_version for each in known), default=0),
        max((info.version for each in known for info in each.loras if info.name == lora), default=0),
    )


def are_within(chunks: Sequence[Chunk], presence: WorkerPresence) -> bool:
    """Return True if chunks agree with the presence of their worker. It is called for each frame.

    The ids of all chunks are compared together. A presence without capabilities announced no vocabulary: False.
    """
    if presence.capabilities is None:
        return False
    version, lora_version = presence.weight_version, None
    ids = []
    for chunk in chunks:
        if chunk.weight_version > version:
            return False
        if chunk.lora_version is not None:
            if lora_version is None:
                lora_version = max((info.version for info in presence.loras), default=0)
            if chunk.lora_version > lora_version:
                return False
        ids.append(chunk.token_ids_data)
        if chunk.top_logprobs is not None or chunk.sampling_mask is not None or chunk.prompt_logprobs is not None:
            ids += _other_ids(chunk)
    return _greatest(b"".join(ids)) < presence.capabilities.vocab_size


def problem_of(chunk: Chunk, announced: Announced) -> str | None:
    """Return how a chunk exceeds these limits; None: it does not."""
    greatest = _greatest(b"".join((chunk.token_ids_data, *_other_ids(chunk))))
    if greatest >= announced.vocab_size:
        return f"token id {greatest}; allowed by its vocabulary: 0 to {announced.vocab_size - 1}"
    if chunk.weight_version > announced.weight_version:
        return f"weight version {chunk.weight_version}; announced and recorded: {announced.weight_version}"
    if chunk.lora_version is not None and chunk.lora_version > announced.lora_version:
        return f"adapter version {chunk.lora_version}; announced and recorded: {announced.lora_version}"
    return None


def _other_ids(chunk: Chunk) -> list[bytes]:
    """Return the ids of tokens that were not sampled."""
    prompt = chunk.prompt_logprobs
    tops = (chunk.top_logprobs, None if prompt is None else prompt.top, chunk.sampling_mask)
    return [each.token_ids_data for each in tops if each is not None]


def _greatest(ids: bytes) -> int:
    """Return the greatest of <i4 ids. A negative id, which is invalid, is above all others; 0 if there is none."""
    if len(ids) > FEW_BYTES:
        return int(np.maximum.reduce(np.frombuffer(ids, _U4)))
    return max(struct.unpack(f"<{len(ids) // 4}I", ids), default=0)
