"""Leases: that of a worker itself, and those of the clients whose requests it serves.

The caller passes in the time of a monotonic clock; nothing here waits.
"""

from collections import OrderedDict
from dataclasses import dataclass

from ....schemas.presence import ClientPresence, ClientState

__all__ = ["ClientLeases", "EndedIncarnation", "WorkerLease"]

DEFAULT_LEASE_S = 5.0
"""The lease in seconds of a client from which a message but no presence has arrived."""
MAX_LEASE_S = 60.0
"""The maximum lease in seconds, even if presence states more: data that a lost client or worker leaves must expire."""
MAX_CLIENTS = 65_536
"""The number of live client incarnations, and also that of remembered dead ones. The oldest dead ones are removed."""

MAX_INCARNATIONS = 8
"""The number of live incarnations of one client name. Each presence of a new one ends the others, so more than two mean
messages with invented incarnations. The one that was first heard longest ago ends, unless it has published presence.
"""


class WorkerLease:
    """The lease of this process. Its peers treat it as lost after `lease_s` without presence.

    Args:
        lease_s: the lease in its presence.
        margin_s: how much earlier than its peers this process treats the lease as expired.
        now: start of the lease before its first confirmation.
    """

    def __init__(self, lease_s: float, margin_s: float, now: float) -> None:
        if not 0 <= margin_s < lease_s:
            raise ValueError(f"the margin is {margin_s} s; allowed: 0 or more, and less than the lease of {lease_s} s")
        self._good_for_s = lease_s - margin_s
        self.expires_at = now + self._good_for_s
        """The last time at which this process may act."""

    def __repr__(self) -> str:
        """Return one line with the end of the lease."""
        return f"<WorkerLease until {self.expires_at:.3f}>"

    def confirm(self, published_at: float) -> None:
        """Record that the server has received the presence that was published at `published_at`."""
        self.expires_at = max(self.expires_at, published_at + self._good_for_s)

    def is_held(self, now: float) -> bool:
        """Return True if this process may act."""
        return now <= self.expires_at


@dataclass(frozen=True, slots=True)
class EndedIncarnation:
    """An ended incarnation of a client. It no longer waits for its requests."""

    client: str
    incarnation: str
    reason: str
    is_closed: bool
    """True if the client closed it and it will not come back. False: its lease expired, or the client restarted."""


@dataclass(slots=True)
class _Lease:
    lease_s: float
    expires_at: float
    is_announced: bool


class ClientLeases:
    """The leases of clients, from the messages that this worker received.

    Args:
        margin_s: seconds after the end of its lease at which a client counts as dead.
    """

    def __init__(self, margin_s: float) -> None:
        self._margin_s = margin_s
        self._live: dict[str, dict[str, _Lease]] = {}
        self._num_live = 0
        # (client, incarnation) -> True if it ended permanently. An expired incarnation may come back.
        self._dead: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<ClientLeases live={self._num_live} dead={len(self._dead)}>"

    def renew(self, presence: ClientPresence, now: float) -> list[EndedIncarnation]:
        """Handle presence. Return the incarnations of this client that it ended.

        The first presence of an incarnation ends all other incarnations of the same client. An incarnation that ended
        permanently stays ended.
        """
        client, incarnation = presence.client, presence.incarnation
        if presence.state is ClientState.CLOSED:
            return self._close(client, incarnation)
        lease = self._find_or_start(client, incarnation, now)
        if lease is None:
            return []
        lease.lease_s = min(presence.lease_s, MAX_LEASE_S)
        lease.expires_at = now + lease.lease_s
        if lease.is_announced:
            return []
        lease.is_announced = True
        others = [other for other in self._live[client] if other != incarnation]
        for other in others:
            self._mark_dead(client, other, is_final=True)
        return [EndedIncarnation(client, other, "a later incarnation of it began", is_closed=False) for other in others]

    def _close(self, client: str, incarnation: str) -> list[EndedIncarnation]:
        is_live = incarnation in self._live.get(client, {})
        has_expired = self._dead.get((client, incarnation)) is False
        self._mark_dead(client, incarnation, is_final=True)
        return (
            [EndedIncarnation(client, incarnation, "it was closed", is_closed=True)] if is_live or has_expired else []
        )

    def renew_lease(self, client: str, incarnation: str, now: float) -> None:
        """Renew the lease at any other message of a client. Start a lease if there is none."""
        lease = self._find_or_start(client, incarnation, now)
        if lease is not None:
            lease.expires_at = now + lease.lease_s

    def start_lease(self, client: str, incarnation: str, now: float) -> None:
        """Start a lease for a client that is not known yet, because its request was in the queue.

        The request may have waited in the queue for a long time, so it does not renew a lease that already exists.
        """
        if incarnation not in self._live.get(client, {}) and not self.is_dead(client, incarnation):
            self._find_or_start(client, incarnation, now)

    def _find_or_start(self, client: str, incarnation: str, now: float) -> _Lease | None:
        """Return the lease of this incarnation, started if needed; None if it has ended or there are too many."""
        leases = self._live.get(client, {})
        lease = leases.get(incarnation)
        if lease is not None:
            return lease
        is_final = self._dead.get((client, incarnation))
        if is_final or self._num_live >= MAX_CLIENTS:
            return None
        if is_final is False:
            if any(other.is_announced for other in leases.values()):
                return None
            del self._dead[client, incarnation]
        lease = _Lease(DEFAULT_LEASE_S, now + DEFAULT_LEASE_S, is_announced=False)
        if len(leases) >= MAX_INCARNATIONS:
            oldest = next(other for other, known in leases.items() if not known.is_announced)
            self._mark_dead(client, oldest, is_final=False)
        self._live.setdefault(client, {})[incarnation] = lease
        self._num_live += 1
        return lease

    def heard_at(self, client: str) -> float | None:
        """Return the time of the last message of a client; None: no incarnation of it has a lease."""
        leases = self._live.get(client, {}).values()
        return max((lease.expires_at - lease.lease_s for lease in leases), default=None)

    def expire(self, now: float) -> list[EndedIncarnation]:
        """End the incarnations whose lease expired more than the margin ago. A later message starts them again."""
        late = [
            (client, incarnation)
            for client, leases in self._live.items()
            for incarnation, lease in leases.items()
            if lease.expires_at + self._margin_s <= now
        ]
        for client, incarnation in late:
            self._mark_dead(client, incarnation, is_final=False)
        return [
            EndedIncarnation(client, incarnation, "its lease expired", is_closed=False) for client, incarnation in late
        ]

    def is_live(self, client: str, incarnation: str) -> bool:
        """Return True if this incarnation has a lease."""
        return incarnation in self._live.get(client, {})

    def restart_leases(self, now: float) -> None:
        """Restart every lease: no presence could arrive while this process was disconnected."""
        for leases in self._live.values():
            for lease in leases.values():
                lease.expires_at = now + lease.lease_s

    def is_dead(self, client: str, incarnation: str) -> bool:
        """Return True if this incarnation was closed, has expired, or a later one began."""
        return (client, incarnation) in self._dead

    def _mark_dead(self, client: str, incarnation: str, *, is_final: bool) -> None:
        leases = self._live.get(client, {})
        if leases.pop(incarnation, None) is not None:
            self._num_live -= 1
            if not leases:
                del self._live[client]
        self._dead[client, incarnation] = is_final
        while len(self._dead) > MAX_CLIENTS:
            self._dead.popitem(last=False)
