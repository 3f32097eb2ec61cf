"""What the engine steps tell about an engine: its prefill and decode speed, and the age of the oldest cached prefix.

The caller passes the time. See `schemas.presence.EngineStats`.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

NUM_SPANS: Final = 64
"""Number of spans into which the tokens of one cache capacity are divided. It sets the resolution of the age."""
MEMORY_S: Final = 10.0
"""Seconds of computing after which the weight of a measurement drops to 1/e. This covers some steps of a large model
and adapts soon to another load."""
MIN_PREFILL: Final = 64
"""Prompt tokens of a step from which the prefill speed is measured. Fewer, as those of a canary, take about as long as
a step without any. A worker that has computed nothing else would seem ten times slower than it is.
"""


def sum_rates(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the measured rates; None: none was measured."""
    measured = [rate for rate in rates if rate is not None]
    return round(sum(measured), 3) if measured else None


class PrefixAge:
    """Estimates the age of the oldest cached prefix from the number of tokens that an engine computes.

    An engine with a prefix cache reuses the least recently used blocks first. After it has computed as many tokens as
    its KV cache holds, every prefix with an earlier last use is evicted, unless a request holds it. Tokens that the
    engine finds in the cache evict no other prefix and are not counted. The estimated age may therefore be too high,
    but never too low. All times are seconds of one clock.

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


class TokenRates:
    """Prefill and decode speed of one scheduler. A plain object without I/O; all times are seconds of one clock."""

    def __init__(self) -> None:
        # Sums that decay with the measured time. For prefill: tokens * seconds, and tokens squared. Their quotient is
        # the least-squares fit of seconds per token. For decode: seconds and tokens.
        self._prefill_weighted_s = self._prefill_squares = 0.0
        self._decode_s = self._decode_tokens = 0.0
        self._ended_at = self._prefilled_until = 0.0
        self._is_interrupted = True
        self._valid_from = 0.0
        self._step_tokens = 0
        self._scheduled_at = math.inf

    @property
    def prefill(self) -> float | None:
        """Prefill speed in tokens per second; None: not measured."""
        return self._prefill_squares / self._prefill_weighted_s if self._prefill_weighted_s > 0 else None

    @property
    def decode(self) -> float | None:
        """Decode speed in tokens per second; None: not measured."""
        return self._decode_tokens / self._decode_s if self._decode_s > 0 else None

    def add_prefill(self, num_tokens: int, scheduled_at: float) -> None:
        """Count a prompt whose first token is in this step: `num_tokens` were computed since it was scheduled.

        Skip a prompt that was scheduled before an interruption: the engine was idle for a part of that time.
        """
        if scheduled_at >= self._valid_from:
            self._step_tokens += num_tokens
            self._scheduled_at = min(self._scheduled_at, scheduled_at)

    def end_step(self, at: float, num_decoded: int) -> None:
        """End a step with tokens; `num_decoded` of them are not the first tokens of their requests.

        A decoding request had a token in an earlier step, so the engine has computed without a break since that step.
        """
        num_prefilled, self._step_tokens = self._step_tokens, 0
        scheduled_at, self._scheduled_at = max(self._scheduled_at, self._prefilled_until), math.inf
        if num_prefilled >= MIN_PREFILL and at > scheduled_at:
            seconds = at - scheduled_at
            kept = math.exp(-seconds / MEMORY_S)
            self._prefill_weighted_s = self._prefill_weighted_s * kept + num_prefilled * seconds
            self._prefill_squares = self._prefill_squares * kept + num_prefilled**2
        if num_prefilled:
            self._prefilled_until = max(self._prefilled_until, at)
        if num_decoded and not self._is_interrupted and at > self._ended_at:
            seconds = at - self._ended_at
            kept = math.exp(-seconds / MEMORY_S)
            self._decode_s = self._decode_s * kept + seconds
            self._decode_tokens = self._decode_tokens * kept + num_decoded
        self._ended_at, self._is_interrupted = at, False

    def interrupt(self, at: float) -> None:
        """Exclude the time from `at` until the next step with tokens: the engine was paused."""
        self._is_interrupted = True
        self._valid_from = at
