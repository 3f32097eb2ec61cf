"""Unsent rows of a request: the buffer merges small steps at once, and cuts large arrays without a copy."""

from collections import deque

import numpy as np

from ....schemas.rows import Rows
from .token_buffer import pop_front

__all__ = ["RowBuffer"]

KEPT_BYTES = 16 * 1024
"""Rows of one step of at least this size are not copied: those of a prompt, not of a token."""
MAX_KEPT_SHARE = 2
"""An array is still copied if it is a view of an array this many times as large, which a slow client would keep alive.
"""


class RowBuffer:
    """The bytes of rows, in order."""

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
