"""How long a peer has given no sign of life, as far as somebody has looked. Pure."""

from typing import Final

__all__ = ["SIGN_S", "SILENT_S", "Silence"]

SIGN_S: Final = 5.0
"""Between two signs of life of a rank; rank 0 renews its lease as often."""
SILENT_S: Final = 60.0
"""A rank that has given no sign for so long is taken for dead: a trainer may hold the interpreter for many seconds."""


class Silence:
    """The silence of one peer, whose signs are numbers that change.

    What lies between two looks counts for one period at most: while the server is away nobody can be heard.
    """

    def __init__(self) -> None:
        self._sign: int | None = None
        self._looked_at = 0.0
        self._silent_s = 0.0

    def __repr__(self) -> str:
        """One line with the seconds."""
        return f"<Silence {self._silent_s:.1f} s>"

    def look(self, sign: int, now: float) -> float:
        """Take note of the last sign there is; return for how many seconds it has been the same."""
        if sign == self._sign:
            self._silent_s += min(now - self._looked_at, SIGN_S)
        else:
            self._sign, self._silent_s = sign, 0.0
        self._looked_at = now
        return self._silent_s
