"""Estimates the age of the oldest prefix in a prefix cache from the number of tokens that an engine computes.

An engine with a prefix cache reuses the least recently used blocks first. After it has computed as many tokens as its
KV cache holds, every prefix with an earlier last use is evicted, unless a request holds it. Tokens that the engine
finds in the cache evict no other prefix and are not counted. The estimated age may therefore be too high, but never too
low.
"""

from collections import deque
from typing import Final

__all__ = ["PrefixAge"]

NUM_SPANS: Final = 64
"""Number of spans into which the tokens of one cache capacity are divided. It sets the resolution of the age."""


class PrefixAge:
    """Age of the oldest prefix. A plain object without I/O; all times are seconds of one clock.

    Args:
        capacity: number of tokens that fit into the KV cache.
        block_tokens: number of tokens in a block; only whole blocks are cached.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._span_tokens = max(capacity // NUM_SPANS, 1)
        # For each span, the time of its first computed token and its number of tokens; the oldest span first. The spans
        # cover the last tokens that fill the cache: at most `NUM_SPANS` + 1 spans.
        self._spans: deque[tuple[float, int]] = deque()
        self._num_spanned = 0
        # Tokens of the current span, which is not full. Below 0: free places in blocks that may never be full.
        self._num_new = 0
        self._new_since = 0.0

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<PrefixAge tokens={self._num_spanned + self._num_new}/{self._capacity}>"

    def add(self, num_tokens: int, at: float, *, num_begun: int = 0) -> None:
        """Count computed tokens of prompts or outputs.

        Args:
            num_begun: number of requests that began with these tokens. One block of each may never be full. The engine
                reuses that block first, which evicts no prefix.
        """
        if self._num_new <= 0:
            self._new_since = at
        # Many requests that fill no block delay the count by at most one capacity.
        self._num_new = max(self._num_new + num_tokens - num_begun * self._block_tokens, -self._capacity)
        if self._num_new < self._span_tokens:
            return
        self._spans.append((self._new_since, self._num_new))
        self._num_spanned += self._num_new
        self._num_new = 0
        while self._num_spanned - self._spans[0][1] >= self._capacity:
            self._num_spanned -= self._spans.popleft()[1]

    def oldest_s(self, now: float) -> float | None:
        """Return the age in seconds of the oldest prefix that may be cached; None: nothing was evicted for certain."""
        return now - self._spans[0][0] if self._num_spanned >= self._capacity else None
