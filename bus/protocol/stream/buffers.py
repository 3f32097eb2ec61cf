"""Unsent tokens and rows of a request, merged as they arrive."""

from collections import deque

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import SamplingMask, TopLogprobs
from ....schemas.errors import LocalProtocolError
from ....schemas.rows import Rows
from .engine_step import RequestStep

_I4 = np.dtype("<i4")
_F4 = np.dtype("<f4")
KEPT_BYTES = 16 * 1024
"""Rows of one step of at least this size are not copied: those of a prompt, not of a token."""
MAX_KEPT_SHARE = 2
"""An array is still copied if it is a view of an array this many times as large, which a slow client would keep alive.
"""


def pop_front(buffer: bytearray, size: int) -> bytes:
    """Remove and return `size` bytes from the front of `buffer`, without moving the rest."""
    if size == len(buffer):
        data = bytes(buffer)
        buffer.clear()
    else:
        data = bytes(buffer[:size])
        del buffer[:size]
    return data


def check_mask(mask: SamplingMask, num_tokens: int, max_bytes: int) -> None:
    """Check that the masks are those of `num_tokens` tokens, and that the mask of each token fits a chunk.

    Raises:
        LocalProtocolError: one of these checks fails.
    """
    counts = mask.counts
    if len(counts) != num_tokens:
        raise LocalProtocolError(f"the engine returned {num_tokens} tokens but sampling masks of {len(counts)}")
    if num_tokens and 4 * int(counts.max()) > max_bytes:
        raise LocalProtocolError(
            f"the engine returned a sampling mask of {counts.max()} ids; a message has room for {max_bytes // 4}. "
            "Use a lower top_k, or return_sampling_mask=False"
        )


class TokenBuffer:
    """Tokens that may share a chunk: the same weights and adapter, and the same kinds of data for each token.

    Args:
        kind: (weight version, adapter version or None, whether there are logprobs, width of the top logprobs or 0,
            whether there are sampling masks).
    """

    def __init__(self, kind: tuple[int, int | None, bool, int, bool]) -> None:
        self.kind = kind
        self.weight_version, self.lora_version, self.has_logprobs, self._width, self.has_masks = kind
        self.token_bytes = 4 + 4 * self.has_logprobs + 8 * self._width + 4 * self.has_masks
        """The bytes of one token with all its data, except the ids of its mask."""
        self.num_tokens = 0
        self.kv_recomputed = False
        """True if the KV of all positions before the first token of this buffer was recomputed."""
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()
        self._mask_counts = bytearray()
        self._mask_ids = bytearray()

    def add(self, step: RequestStep) -> None:
        """Append the tokens of `step`, which must be of this kind. They are copied."""
        self.num_tokens += len(step.token_ids)
        self._ids += step.token_ids.astype(_I4, copy=False).tobytes()
        if step.logprobs is not None:
            self._logprobs += step.logprobs.astype(_F4, copy=False).tobytes()
        if step.top_logprobs is not None:
            self._top_ids += step.top_logprobs.token_ids_data
            self._top_logprobs += step.top_logprobs.logprobs_data
        if step.sampling_mask is not None:
            self._mask_counts += step.sampling_mask.counts_data
            self._mask_ids += step.sampling_mask.token_ids_data

    def num_bytes(self, count: int) -> int:
        """Return the bytes of the first `count` tokens."""
        size = count * self.token_bytes
        return size + 4 * int(self._num_ids(count).sum()) if self.has_masks else size

    def num_fitting(self, num_bytes: int, row_bytes: int) -> int:
        """Return how many tokens fit, at least one. Each token except the last comes with a row of `row_bytes`."""
        if not self.has_masks:
            room = max(num_bytes - self.token_bytes, 0)
            return min(self.num_tokens, 1 + room // (self.token_bytes + row_bytes))
        # Each token needs at least `token_bytes`, so only this many need a check.
        sizes = 4 * self._num_ids(min(self.num_tokens, 1 + max(num_bytes, 0) // self.token_bytes))
        sizes += self.token_bytes + row_bytes
        return max(int(np.searchsorted(sizes.cumsum() - row_bytes, num_bytes, "right")), 1)

    def _num_ids(self, count: int) -> npt.NDArray[np.int64]:
        """Return the number of ids in the masks of the first `count` tokens, i8[count]."""
        # A copy, because a view of the buffer would prevent it from growing.
        return np.frombuffer(bytes(self._mask_counts[: 4 * count]), _I4).astype(np.int64)

    def pop(self, count: int) -> tuple[bytes, bytes | None, TopLogprobs | None, SamplingMask | None]:
        """Remove the first `count` tokens, at least one.

        Return ids, logprobs, top logprobs and masks in wire format.
        """
        self.num_tokens -= count
        self.kv_recomputed = False
        logprobs = pop_front(self._logprobs, 4 * count) if self.has_logprobs else None
        top = None
        if self._width:
            size = 4 * self._width * count
            top = TopLogprobs(self._width, pop_front(self._top_ids, size), pop_front(self._top_logprobs, size))
        mask = None
        if self.has_masks:
            size = 4 * int(self._num_ids(count).sum())
            mask = SamplingMask(pop_front(self._mask_counts, 4 * count), pop_front(self._mask_ids, size))
        return pop_front(self._ids, 4 * count), logprobs, top, mask


class RowBuffer:
    """The bytes of rows, in order.

    The buffer merges small steps at once, and cuts large arrays without a copy.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        # No segment is empty. Only the last may be a bytearray.
        self._parts: deque[bytearray | memoryview] = deque()

    def add(self, rows: Rows) -> None:
        """Append C-contiguous `rows`. Large ones must not change any more."""
        if rows.nbytes >= KEPT_BYTES and _keeps_little_else(rows):
            self._parts.append(rows.reshape(-1).view(np.uint8).data)
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, bytearray):
            last += rows.tobytes()
        else:
            self._parts.append(bytearray(rows.tobytes()))

    def pop(self, size: int) -> bytes | memoryview:
        """Remove and return the first `size` bytes, which must exist."""
        if size and size <= len(self._parts[0]):
            return self._pop_first(size)
        taken = bytearray()
        while len(taken) < size:
            taken += self._pop_first(min(size - len(taken), len(self._parts[0])))
        return bytes(taken)

    def _pop_first(self, size: int) -> bytes | memoryview:
        first = self._parts[0]
        if isinstance(first, bytearray):
            data: bytes | memoryview = pop_front(first, size)
        else:
            data = first[:size]
            self._parts[0] = first[size:]
        if not self._parts[0]:
            self._parts.popleft()
        return data

    def clear(self) -> None:
        """Remove all rows."""
        self._parts.clear()


def _keeps_little_else(rows: Rows) -> bool:
    """Return True if the memory that `rows` keeps alive is mostly its own; False if this is not known."""
    owner: object = rows.base
    if owner is None:
        return True
    num_bytes = getattr(owner, "nbytes", None)
    return num_bytes is not None and num_bytes <= rows.nbytes * MAX_KEPT_SHARE
