"""Decides which of two workers of one id gives way. Time is passed in; nothing here waits.

Two processes get the same id from copied credentials or from a templated `--worker-id`. The worker that has held the id
longer, without a lost lease, keeps it. A worker that hears one ahead of it gives way, but not at its first message: a
worker that is being stopped still announces itself for a moment.

Invariant: of two workers that hear each other, never both give way. A worker reports how long it has held the id at the
moment of publishing, so that the other one never overestimates it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ....schemas.presence import WorkerPresence, WorkerState

__all__ = ["SILENCE_S", "DuplicateWatch", "Standing"]

SILENCE_S: Final = 1.2
"""Before its first announcement a new worker listens for a heartbeat of another one, so that no client sees both."""
MAX_PROOF_S: Final = 3.0
"""How long another worker is heard before this one gives way: longer than a worker that stops takes to end its work."""
PROOF_OF_LEASE: Final = 0.6
"""The same as a share of the lease, which may be short."""
TIE_S: Final = 1.0
"""Of workers whose times differ by less, and that both hold the id or both do not, the incarnations' order decides."""
MAX_OTHERS: Final = 16
"""Incarnations that are followed; more are not looked at until one is silent."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What this worker compares with what it hears."""

    incarnations: Collection[str]
    """Of this process, the present one last."""
    held_s: float
    """Seconds since the first confirmed announcement of the present incarnation; 0 before that, and while fenced."""

    def is_behind(self, other: WorkerPresence) -> bool:
        """Return True if `other` has held the id longer."""
        other_s = other.uptime_s if other.held_s is None else other.held_s
        if other.state is WorkerState.FENCED:
            other_s = 0.0
        if (other_s > 0) != (self.held_s > 0):
            # One of the two has no confirmed lease: it starts, or its lease ran out. The other one keeps the id.
            return other_s > 0
        if abs(other_s - self.held_s) > TIE_S:
            return other_s > self.held_s
        return other.incarnation < list(self.incarnations)[-1]


@dataclass(slots=True)
class _Other:
    received_at: float
    ahead_since: float | None = None
    """Since when each of its announcements was of a worker ahead of this one."""


class DuplicateWatch:
    """Follows the other workers of this worker's id.

    Args:
        lease_s: of this worker.
        listen_s: how long it listens before it serves; 0: its id is unique by its making.
        now: from when it listens.
    """

    def __init__(self, lease_s: float, listen_s: float, now: float) -> None:
        self._proof_s = min(MAX_PROOF_S, PROOF_OF_LEASE * lease_s)
        self._silent_after_s = lease_s / 2
        self._speaks_at = now + min(SILENCE_S, listen_s)
        self._serves_at = now + listen_s
        self._others: dict[str, _Other] = {}

    def __repr__(self) -> str:
        """One line with the others."""
        return f"<DuplicateWatch {' '.join(self._others) or 'alone'}>"

    def receive(self, presence: WorkerPresence, own: Standing, now: float) -> bool:
        """Take an announcement on this worker's own subject; return True if this worker gives way to its sender."""
        incarnation = presence.incarnation
        if incarnation in own.incarnations:
            return False
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED):
            self._others.pop(incarnation, None)
            return False
        for name in [name for name, other in self._others.items() if now - other.received_at > self._silent_after_s]:
            del self._others[name]
        if incarnation not in self._others and len(self._others) >= MAX_OTHERS:
            return False
        other = self._others.setdefault(incarnation, _Other(now))
        other.received_at = now
        if not own.is_behind(presence):
            other.ahead_since = None
            return False
        if other.ahead_since is None:
            other.ahead_since = now
        return now - other.ahead_since >= self._proof_s

    def is_known(self, presence: WorkerPresence) -> bool:
        """Return True if the sender was heard of lately."""
        return presence.incarnation in self._others

    def _contested_until(self) -> float:
        """Until when a worker that is ahead of this one counts as there, by what was heard of it."""
        ahead = (other.received_at for other in self._others.values() if other.ahead_since is not None)
        return max(ahead, default=-math.inf) + self._silent_after_s

    def announces_in_s(self, now: float) -> float:
        """Seconds until a worker that does not serve may announce itself, unless more is heard; 0 or less: now."""
        return max(self._speaks_at, self._contested_until()) - now

    def serves_in_s(self, now: float) -> float:
        """Seconds until this worker may begin to serve, likewise."""
        return max(self._serves_at, self._contested_until()) - now
