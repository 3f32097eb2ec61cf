"""How long ago the oldest prefix was used that a prefix cache can still hold, from what an engine computes.

Engines with a prefix cache reuse the blocks of least recent use first. So once it has computed as many tokens as its KV
cache has room for, all that was last used before is gone, unless a request holds it. Tokens that an engine finds in the
cache take no room of another prefix, and are not counted: the age may be too high, but it is not too low.
"""

from collections import deque
from typing import Final

__all__ = ["PrefixAge"]

NUM_SPANS: Final = 64
"""Parts in which the tokens of one capacity are remembered: so exact is the age."""


class PrefixAge:
    """The age of the oldest prefix. Plain state; all times are of one clock, in seconds.

    Args:
        capacity: tokens for which the KV cache has room.
        block_tokens: tokens of a block; only whole blocks are cached.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._span_tokens = max(capacity // NUM_SPANS, 1)
        # When the first token of each span was computed, and its tokens; the oldest span first. Together they are of
        # the last tokens that fill the cache: at most `NUM_SPANS` and one.
        self._spans: deque[tuple[float, int]] = deque()
        self._num_spanned = 0
        # Of the span that is not full yet. Below 0: tokens that blocks which are not full may have room for.
        self._num_new = 0
        self._new_since = 0.0

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<PrefixAge tokens={self._num_spanned + self._num_new}/{self._capacity}>"

    def add(self, num_tokens: int, at: float, *, num_begun: int = 0) -> None:
        """Count tokens of prompts or answers that were computed.

        Args:
            num_begun: requests that began with these tokens. A block of each may never be full: the next request gets
                it first, and no prefix is gone for it.
        """
        if self._num_new <= 0:
            self._new_since = at
        # Many requests that fill no block delay what is counted by one capacity at most.
        self._num_new = max(self._num_new + num_tokens - num_begun * self._block_tokens, -self._capacity)
        if self._num_new < self._span_tokens:
            return
        self._spans.append((self._new_since, self._num_new))
        self._num_spanned += self._num_new
        self._num_new = 0
        while self._num_spanned - self._spans[0][1] >= self._capacity:
            self._num_spanned -= self._spans.popleft()[1]

    def oldest_s(self, now: float) -> float | None:
        """Return the age of the oldest prefix that can still be there; None: nothing has to be gone yet."""
        return now - self._spans[0][0] if self._num_spanned >= self._capacity else None
