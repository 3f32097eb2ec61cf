"""How fast an engine computes prompts and makes tokens, measured while it does; see `schemas.presence.EngineStats`."""

import math
from typing import Final

__all__ = ["TokenRates"]

MEMORY_S: Final = 10.0
"""Seconds of computing after which a measurement counts a third: some steps of a large model, and soon another load."""


class TokenRates:
    """Prefill and decode tokens a second of one scheduler. Plain state; all times are of one clock, in seconds."""

    def __init__(self) -> None:
        # Sums that decay by the time measured. Of prefills tokens * seconds over tokens squared: the seconds a token
        # that fit best if all time went into tokens. Of decoding seconds and tokens.
        self._prefill_weighted_s = self._prefill_squares = 0.0
        self._decode_s = self._decode_tokens = 0.0
        self._ended_at = self._prefilled_until = 0.0
        self._is_interrupted = True
        self._valid_from = 0.0
        self._step_tokens = 0
        self._scheduled_at = math.inf

    @property
    def prefill(self) -> float | None:
        """Tokens a second; None: nothing was measured."""
        return self._prefill_squares / self._prefill_weighted_s if self._prefill_weighted_s > 0 else None

    @property
    def decode(self) -> float | None:
        """Tokens a second; None: nothing was measured."""
        return self._decode_tokens / self._decode_s if self._decode_s > 0 else None

    def add_prefill(self, num_tokens: int, scheduled_at: float) -> None:
        """Count a prompt of which this step makes the first token: `num_tokens` were computed since it was scheduled.

        One that was scheduled before an interruption is left out: for a part of that time nothing was computed.
        """
        if scheduled_at >= self._valid_from:
            self._step_tokens += num_tokens
            self._scheduled_at = min(self._scheduled_at, scheduled_at)

    def end_step(self, at: float, num_decoded: int) -> None:
        """End a step that made tokens; of those, `num_decoded` were not the first ones of their requests.

        A request that decodes had a token in an earlier step, so the engine has computed since the last one.
        """
        num_prefilled, self._step_tokens = self._step_tokens, 0
        scheduled_at, self._scheduled_at = max(self._scheduled_at, self._prefilled_until), math.inf
        if num_prefilled and at > scheduled_at:
            seconds = at - scheduled_at
            kept = math.exp(-seconds / MEMORY_S)
            self._prefill_weighted_s = self._prefill_weighted_s * kept + num_prefilled * seconds
            self._prefill_squares = self._prefill_squares * kept + num_prefilled**2
            self._prefilled_until = at
        if num_decoded and not self._is_interrupted and at > self._ended_at:
            seconds = at - self._ended_at
            kept = math.exp(-seconds / MEMORY_S)
            self._decode_s = self._decode_s * kept + seconds
            self._decode_tokens = self._decode_tokens * kept + num_decoded
        self._ended_at, self._is_interrupted = at, False

    def interrupt(self, at: float) -> None:
        """Leave out the time from `at` until the next step that makes tokens: the engine was paused."""
        self._is_interrupted = True
        self._valid_from = at
