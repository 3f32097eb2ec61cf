"""Measures for how long a peer has been silent, while the caller could observe it. No I/O."""

from typing import Final

__all__ = ["SIGN_S", "SILENT_S", "Silence"]

SIGN_S: Final = 5.0
"""Seconds between two periodic messages of a rank. Rank 0 renews its lease at the same interval."""
SILENT_S: Final = 60.0
"""Seconds without such a message after which a rank counts as dead. The limit is long, because a trainer may hold the
interpreter lock for many seconds.
"""


class Silence:
    """The silence of one peer, whose messages have changing numbers.

    The time between two calls counts for at most one period, because no message can arrive while the server is
    unavailable.
    """

    def __init__(self) -> None:
        self._sign: int | None = None
        self._recorded_at = 0.0
        self._silent_s = 0.0

    def __repr__(self) -> str:
        """Return one line with the seconds."""
        return f"<Silence {self._silent_s:.1f} s>"

    def record(self, sign: int, now: float) -> float:
        """Record the number of the last message. Return the seconds for which the number has been the same."""
        if sign == self._sign:
            self._silent_s += min(now - self._recorded_at, SIGN_S)
        else:
            self._sign, self._silent_s = sign, 0.0
        self._recorded_at = now
        return self._silent_s
