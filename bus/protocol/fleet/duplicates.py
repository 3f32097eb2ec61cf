"""Decides which of two workers with one id gives way. The caller passes in the time; nothing here waits.

Two processes get the same id from copied credentials or from a templated `--worker-id`. The worker that has held the id
longer, without a lost lease, keeps the id. The other worker gives way, but not at the first presence message: a worker
that is being stopped still publishes presence for a moment.

Invariant: of two workers that receive each other's presence, never both give way. A worker reports how long it has held
the id at the moment of publishing, so that the other worker never overestimates this time.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ....schemas.presence import WorkerPresence, WorkerState

__all__ = ["SILENCE_S", "DuplicateWatch", "OwnIncarnation"]

SILENCE_S: Final = 1.2
"""Seconds for which a new worker listens before its first presence. A heartbeat of another worker arrives in this time,
so no client sees both workers.
"""
MAX_PROOF_S: Final = 3.0
"""The longest time with presence of another worker before this worker gives way: longer than a stopping worker needs
to end its requests.
"""
PROOF_OF_LEASE: Final = 0.6
"""The same time as a share of the lease. The shorter of the two times counts."""
TIE_S: Final = 1.0
"""If the times of two workers differ by less, the order of the incarnations decides. Both hold the id, or both do not.
"""
MAX_OTHERS: Final = 16
"""Incarnations that are followed. Presence of further ones is ignored until one of these is silent."""


@dataclass(frozen=True, slots=True)
class OwnIncarnation:
    """The values of this worker that it compares with received presence."""

    incarnations: Collection[str]
    """The incarnations of this process, the present one last."""
    held_s: float
    """Seconds since the first confirmed presence of the present incarnation; 0 before that, and while fenced."""

    def is_behind(self, other: WorkerPresence) -> bool:
        """Return True if `other` has held the id longer."""
        other_s = other.uptime_s if other.held_s is None else other.held_s
        if other.state is WorkerState.FENCED:
            other_s = 0.0
        if (other_s > 0) != (self.held_s > 0):
            # One of the two has no confirmed lease: it starts, or its lease expired. The other one keeps the id.
            return other_s > 0
        if abs(other_s - self.held_s) > TIE_S:
            return other_s > self.held_s
        return other.incarnation < list(self.incarnations)[-1]


@dataclass(slots=True)
class _Other:
    received_at: float
    ahead_since: float | None = None
    """The time since which every presence message showed that this other worker has held the id longer."""


class DuplicateWatch:
    """Tracks the other workers with this worker's id.

    Args:
        lease_s: lease in seconds of this worker.
        listen_s: seconds for which it listens before it serves; 0: its id is unique by construction.
        now: time at which it starts to listen.
    """

    def __init__(self, lease_s: float, listen_s: float, now: float) -> None:
        self._proof_s = min(MAX_PROOF_S, PROOF_OF_LEASE * lease_s)
        self._silent_after_s = lease_s / 2
        self._speaks_at = now + min(SILENCE_S, listen_s)
        self._serves_at = now + listen_s
        self._others: dict[str, _Other] = {}

    def __repr__(self) -> str:
        """Return one line with the others."""
        return f"<DuplicateWatch {' '.join(self._others) or 'alone'}>"

    def receive(self, presence: WorkerPresence, own: OwnIncarnation, now: float) -> bool:
        """Handle presence on this worker's own subject. Return True if this worker gives way to the sender."""
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
        """Return True if presence of this sender arrived recently."""
        return presence.incarnation in self._others

    def _contested_until(self) -> float:
        """Return until when a worker that has held the id longer counts as live, given its last presence."""
        ahead = (other.received_at for other in self._others.values() if other.ahead_since is not None)
        return max(ahead, default=-math.inf) + self._silent_after_s

    def announces_in_s(self, now: float) -> float:
        """Return the seconds until this worker may publish presence although it does not serve; 0 or less: now.

        Presence of another worker may extend this time.
        """
        return max(self._speaks_at, self._contested_until()) - now

    def serves_in_s(self, now: float) -> float:
        """Return the seconds until this worker may begin to serve; 0 or less: now.

        Presence of another worker may extend this time.
        """
        return max(self._serves_at, self._contested_until()) - now
