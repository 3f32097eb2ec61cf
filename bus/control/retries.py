"""The retry limits for a write of a desired state, which may have to wait for the election of a cluster's leader."""

import asyncio
import logging
import time
from typing import Final

from ..nats.jetstream import Unanswered

__all__ = ["TRY_S", "Retries"]

logger = logging.getLogger(__name__)

TRY_S: Final = 2.0
"""Seconds for one answer, which takes milliseconds. A leader election drops earlier requests, so they must be
repeated."""
ELECTION_S: Final = 15.0
"""Seconds from the first missing answer. nats-server waits up to 9 s before it elects another leader."""
AGAIN_S: Final = 0.25
"""Seconds between a "not now" answer and the next request."""


class Retries:
    """The tries of one write."""

    def __init__(self) -> None:
        self._ends_at: float | None = None
        self._refused_at: int | None = None

    def __repr__(self) -> str:
        """One line with the end."""
        return f"<Retries ends_at={self._ends_at}>"

    async def note_refusal(self, sequence: int) -> None:
        """Note that another write was first, where `sequence` was the last one.

        Where that is so again, the other one is not stored yet: a leader without a majority refuses at once, and goes
        on doing so. Then this waits.

        Raises:
            Unanswered: it has been waited for long enough.
        """
        is_again, self._refused_at = sequence == self._refused_at, sequence
        if is_again:
            await self.wait(Unanswered("another write is on its way through the servers of the cluster"))

    async def wait(self, error: Unanswered) -> None:
        """Wait before the next try.

        Raises:
            Unanswered: `error`; it has been waited for long enough.
        """
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + ELECTION_S
            logger.warning("desired.request_failed error=%s", error)
        if now >= self._ends_at:
            raise error
        await asyncio.sleep(AGAIN_S)
