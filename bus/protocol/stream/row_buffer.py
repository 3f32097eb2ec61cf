"""Rows of a request that wait to be sent: small steps are merged as they come, large arrays are cut where they lie."""

from collections import deque

import numpy as np

from ....schemas.rows import Rows
from .token_buffer import pop_front

__all__ = ["RowBuffer"]

KEPT_BYTES = 16 * 1024
"""Rows of one step from here on are not copied: those of a prompt, not of a token."""
MAX_KEPT_SHARE = 2
"""An array is copied all the same where it is a view of one so many times as large: a slow client would keep it all."""


class RowBuffer:
    """Bytes of rows, in order."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        # None of them empty; a bytearray only at the end.
        self._parts: deque[bytearray | memoryview] = deque()

    def add(self, rows: Rows) -> None:
        """Append `rows`, C-contiguous; large ones must not change any more."""
        if rows.nbytes >= KEPT_BYTES and _keeps_little_else(rows):
            self._parts.append(rows.reshape(-1).view(np.uint8).data)
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, bytearray):
            last += rows.tobytes()
        else:
            self._parts.append(bytearray(rows.tobytes()))

    def pop(self, size: int) -> bytes | memoryview:
        """Take the first `size` bytes, of which there are as many."""
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
        """Drop everything."""
        self._parts.clear()


def _keeps_little_else(rows: Rows) -> bool:
    """The memory that lives as long as `rows` does is mostly theirs; False where that is not known."""
    owner: object = rows.base
    if owner is None:
        return True
    num_bytes = getattr(owner, "nbytes", None)
    return num_bytes is not None and num_bytes <= rows.nbytes * MAX_KEPT_SHARE
