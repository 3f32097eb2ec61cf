"""Output that waits for its chunk: tokens and rows, in the form in which they leave."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import SamplingMask, TopLogprobs
from ....schemas.rows import Rows

_I4 = np.dtype("<i4")
KEPT_BYTES = 16 * 1024
"""Rows of one step of at least this size are not copied: those of a prompt, not of a token."""
MAX_KEPT_SHARE = 2
"""An array is still copied if it is a view of an array this many times as large: a slow client would keep it alive."""


Buffer = bytes | bytearray
"""Bytes in order. One part is kept as it came, so that the usual single token of a step is not copied."""


def append(buffer: Buffer, data: bytes) -> Buffer:
    """Return the buffer with `data` at its end. It may be the same object."""
    if not buffer:
        return data
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    buffer += data
    return buffer


def pop_front(buffer: Buffer, size: int) -> tuple[bytes, Buffer]:
    """Return the first `size` bytes, and the buffer without them, which may be the same object."""
    if size == len(buffer):
        return bytes(buffer), b""
    data = bytes(buffer[:size])
    if isinstance(buffer, bytes):
        return data, buffer[size:]
    del buffer[:size]
    return data, buffer


T = TypeVar("T")


def share_names(kind: type[T]) -> type[T]:
    """Let all instances of a class share the names of the attributes of which the class has the first values.

    Each class with many instances needs this. CPython shares only the names that its first instances have got; the
    others would get a dict each, of several times the size.
    """
    first = kind.__new__(kind)
    for one in reversed(kind.__mro__[:-1]):
        for name, value in vars(one).items():
            if not name.startswith("__") and not hasattr(value, "__get__"):
                setattr(first, name, value)
    return kind


@share_names
class TokenBuffer:
    """Tokens that may share a chunk: the same weights and adapter, and the same kinds of data for each token.

    Args:
        kind: (weight version, adapter version or None, whether there are logprobs, width of the top logprobs or 0,
            whether there are sampling masks).
    """

    num_tokens = 0
    kv_recomputed = False
    """True if the KV of all positions before the first token of this buffer was recomputed."""
    _ids: Buffer = b""
    _logprobs: Buffer = b""
    _top_ids: Buffer = b""
    _top_logprobs: Buffer = b""
    _mask_counts: Buffer = b""
    _mask_ids: Buffer = b""

    def __init__(self, kind: tuple[int, int | None, bool, int, bool]) -> None:
        self.kind = kind
        self.weight_version, self.lora_version, self.has_logprobs, self._width, self.has_masks = kind
        self.token_bytes = 4 + 4 * self.has_logprobs + 8 * self._width + 4 * self.has_masks
        """The bytes of one token with all its data, except the ids of its mask."""

    def add(self, token_ids: bytes, logprobs: bytes | None) -> None:
        """Append tokens of this kind, <i4[k] and <f4[k]."""
        self.num_tokens += len(token_ids) // 4
        self._ids = append(self._ids, token_ids)
        if logprobs is not None:
            self._logprobs = append(self._logprobs, logprobs)

    def add_extras(self, top: TopLogprobs | None, mask: SamplingMask | None) -> None:
        """Append the top logprobs and masks of the tokens that were added last."""
        if top is not None:
            self._top_ids = append(self._top_ids, top.token_ids_data)
            self._top_logprobs = append(self._top_logprobs, top.logprobs_data)
        if mask is not None:
            self._mask_counts = append(self._mask_counts, mask.counts_data)
            self._mask_ids = append(self._mask_ids, mask.token_ids_data)

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
        self.kv_recomputed = False
        logprobs, top, mask = None, None, None
        if self._width:
            size = 4 * self._width * count
            top_ids, self._top_ids = pop_front(self._top_ids, size)
            top_logprobs, self._top_logprobs = pop_front(self._top_logprobs, size)
            top = TopLogprobs(self._width, top_ids, top_logprobs)
        if self.has_masks:
            size = 4 * int(self._num_ids(count).sum())
            counts, self._mask_counts = pop_front(self._mask_counts, 4 * count)
            mask_ids, self._mask_ids = pop_front(self._mask_ids, size)
            mask = SamplingMask(counts, mask_ids)
        if self.has_logprobs:
            logprobs, self._logprobs = pop_front(self._logprobs, 4 * count)
        ids, self._ids = pop_front(self._ids, 4 * count)
        self.num_tokens -= count
        return ids, logprobs, top, mask


class RowBuffer:
    """The bytes of rows, in order.

    The buffer merges small steps at once, and cuts large arrays without a copy.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        # No part is empty. Only the last may grow.
        self._parts: list[Buffer | memoryview] = []

    def add(self, rows: Rows) -> None:
        """Append C-contiguous `rows`. Large ones must not change any more."""
        if rows.nbytes >= KEPT_BYTES and _keeps_little_else(rows):
            self._parts.append(rows.reshape(-1).view(np.uint8).data)
        else:
            self.add_bytes(rows.tobytes())

    def add_bytes(self, rows: bytes) -> None:
        """Append the bytes of rows."""
        if self._parts and not isinstance(last := self._parts[-1], memoryview):
            self._parts[-1] = append(last, rows)
        else:
            self._parts.append(rows)

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
        data: bytes | memoryview
        rest: Buffer | memoryview
        if isinstance(first, memoryview):
            data, rest = first[:size], first[size:]
        else:
            data, rest = pop_front(first, size)
        if rest:
            self._parts[0] = rest
        else:
            del self._parts[0]
        return data


def _keeps_little_else(rows: Rows) -> bool:
    """Return True if the memory that `rows` keeps alive is mostly its own; False if this is not known."""
    owner: object = rows.base
    if owner is None:
        return True
    num_bytes = getattr(owner, "nbytes", None)
    return num_bytes is not None and num_bytes <= rows.nbytes * MAX_KEPT_SHARE
