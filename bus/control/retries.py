"""The retry limits for a write of a desired state, which may have to wait for the election of a cluster's leader."""

import asyncio
import logging
import time
from typing import Final

from ..nats.jetstream import Unanswered

__all__ = ["TRY_S", "Retries"]

logger = logging.getLogger(__name__)

TRY_S: Final = 2.0
"""Seconds to wait for one answer, which usually takes milliseconds. A leader election drops earlier requests, so they
must be repeated."""
ELECTION_S: Final = 15.0
"""Seconds from the first missing answer. nats-server waits up to 9 s before it elects another leader."""
AGAIN_S: Final = 0.25
"""Seconds between a "not now" answer and the next request."""


class Retries:
    """The tries of one write, and when to stop."""

    def __init__(self) -> None:
        self._ends_at: float | None = None
        self._refused_at: int | None = None

    def __repr__(self) -> str:
        """Return one line with the end."""
        return f"<Retries ends_at={self._ends_at}>"

    async def note_refusal(self, sequence: int) -> None:
        """Record that the server refused a write because another write came first.

        `sequence` is the number of the newest write that this program had read before its own write. If the server
        refuses again with the same number, wait, because the other write is not stored yet. A leader without a
        majority refuses writes immediately and repeatedly.

        Raises:
            Unanswered: the time for an election has passed.
        """
        is_again, self._refused_at = sequence == self._refused_at, sequence
        if is_again:
            await self.wait(Unanswered("another write is on its way through the servers of the cluster"))

    async def wait(self, error: Unanswered) -> None:
        """Wait before the next try.

        Raises:
            Unanswered: `error`, because the time for an election has passed.
        """
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + ELECTION_S
            logger.warning("desired.request_failed error=%s", error)
        if now >= self._ends_at:
            raise error
        await asyncio.sleep(AGAIN_S)
