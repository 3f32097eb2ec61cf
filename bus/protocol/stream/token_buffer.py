"""Tokens of a request that wait to be sent, merged as they come."""

import numpy as np

from ....schemas.chunk import TopLogprobs
from .engine_step import RequestStep

__all__ = ["TokenBuffer", "pop_front"]

_I4 = np.dtype("<i4")
_F4 = np.dtype("<f4")


def pop_front(buffer: bytearray, size: int) -> bytes:
    """Take `size` bytes from the front of `buffer`, without moving the rest."""
    if size == len(buffer):
        data = bytes(buffer)
        buffer.clear()
    else:
        data = bytes(buffer[:size])
        del buffer[:size]
    return data


class TokenBuffer:
    """Tokens that may share a chunk: of the same weights and adapter, and alike in what comes with each.

    Args:
        kind: (weight version, adapter version or None, whether there are logprobs, width of the top logprobs or 0).
    """

    __slots__ = (
        "_ids",
        "_logprobs",
        "_top_ids",
        "_top_logprobs",
        "_width",
        "has_logprobs",
        "kind",
        "kv_recomputed",
        "lora_version",
        "num_tokens",
        "token_bytes",
        "weight_version",
    )

    def __init__(self, kind: tuple[int, int | None, bool, int]) -> None:
        self.kind = kind
        self.weight_version, self.lora_version, self.has_logprobs, self._width = kind
        self.token_bytes = 4 + 4 * self.has_logprobs + 8 * self._width
        """What one token takes, with all that comes with it."""
        self.num_tokens = 0
        self.kv_recomputed = False
        """The KV of all positions before the first token here was computed anew."""
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def add(self, step: RequestStep) -> None:
        """Append the tokens of `step`, which is of this kind; they are copied."""
        self.num_tokens += len(step.token_ids)
        self._ids += step.token_ids.astype(_I4, copy=False).tobytes()
        if step.logprobs is not None:
            self._logprobs += step.logprobs.astype(_F4, copy=False).tobytes()
        if step.top_logprobs is not None:
            self._top_ids += step.top_logprobs.token_ids_data
            self._top_logprobs += step.top_logprobs.logprobs_data

    def pop(self, count: int) -> tuple[bytes, bytes | None, TopLogprobs | None]:
        """Take the first `count` tokens, at least one: ids and logprobs as on the wire, and the top logprobs."""
        self.num_tokens -= count
        self.kv_recomputed = False
        logprobs = pop_front(self._logprobs, 4 * count) if self.has_logprobs else None
        top = None
        if self._width:
            size = 4 * self._width * count
            top = TopLogprobs(self._width, pop_front(self._top_ids, size), pop_front(self._top_logprobs, size))
        return pop_front(self._ids, 4 * count), logprobs, top
