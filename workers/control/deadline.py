"""The time limit of a command."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ...schemas.errors import ControlCode, ControlError

__all__ = ["Deadline"]


class Deadline:
    """The deadline of a command after its `timeout_s`. The remaining time limits every step of the command.

    Args:
        timeout_s: seconds until the deadline.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Remaining seconds, at least 0."""
        return max(self._at - time.monotonic(), 0.0)

    @contextlib.asynccontextmanager
    async def bound(self, what: str) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises:
            ControlError: `timeout`. The message names `what`, the step of the command.
        """
        try:
            async with asyncio.timeout(self.left_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            problem = f"{what} was not done within the command's {self._timeout_s:g} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None
