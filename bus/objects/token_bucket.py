"""A rate limit in bytes per second that several transfers share. Pure: the caller has the clock and sleeps."""

from typing import Final

__all__ = ["TokenBucket"]

BURST_S: Final = 0.25
"""Seconds of the rate that may pass at once after idle time, so that a busy event loop still reaches the rate."""


class TokenBucket:
    """Limits transfers to a rate. After idle time, the bytes of `BURST_S` may pass at once.

    Args:
        rate: bytes per second.
        now: seconds on a clock that only rises; all calls use the same clock.
    """

    def __init__(self, rate: int, now: float) -> None:
        self._rate = rate
        self._paid_until = now - BURST_S
        """Time at which the counted bytes would have passed at exactly the rate."""

    def __repr__(self) -> str:
        """Return one line with the rate."""
        return f"<TokenBucket rate={self._rate}>"

    def spend(self, num_bytes: int, now: float) -> float:
        """Count passed bytes. Return the seconds to wait before more bytes may pass."""
        self._paid_until = max(self._paid_until, now - BURST_S) + num_bytes / self._rate
        return max(0.0, self._paid_until - now)
