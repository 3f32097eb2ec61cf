"""How long a command may still take."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ...schemas.errors import ControlCode, ControlError

__all__ = ["Deadline"]


class Deadline:
    """The instant at which a command's `timeout_s` is over; every step of it is bounded by what is left.

    Args:
        timeout_s: from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, never below 0."""
        return max(self._at - time.monotonic(), 0.0)

    @contextlib.asynccontextmanager
    async def bound(self, what: str) -> AsyncIterator[None]:
        """Cancel the block when the time is over.

        Raises:
            ControlError: `timeout`, with `what` was not done.
        """
        try:
            async with asyncio.timeout(self.left_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            problem = f"{what} was not done within the command's {self._timeout_s:g} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None
