"""Who is still there: a worker's own lease, and those of the clients whose requests it serves.

Time is passed in, as of a monotonic clock; nothing here waits.
"""

from collections import OrderedDict
from dataclasses import dataclass

from ....schemas.presence import ClientPresence, ClientState

__all__ = ["ClientLeases", "EndedIncarnation", "WorkerLease"]

DEFAULT_LEASE_S = 5.0
"""Of a client that was heard but has not announced itself."""
MAX_LEASE_S = 60.0
"""No announcement is good for longer, whatever it says: what a client or worker leaves behind must go at last."""
MAX_CLIENTS = 65_536
"""Incarnations of clients that are followed, and as many again that are known to be dead; the oldest are forgotten."""


class WorkerLease:
    """For how long this process may act: others give it up when they have not heard of it for `lease_s`.

    Args:
        lease_s: as announced.
        margin_s: by which this side gives up before the others do.
        now: from when the lease runs before its first confirmation.
    """

    def __init__(self, lease_s: float, margin_s: float, now: float) -> None:
        if not 0 <= margin_s < lease_s:
            raise ValueError(f"a margin of {margin_s} s does not fit a lease of {lease_s} s")
        self._good_for_s = lease_s - margin_s
        self.expires_at = now + self._good_for_s
        """The last instant at which this process may act."""

    def __repr__(self) -> str:
        """One line with its end."""
        return f"<WorkerLease until {self.expires_at:.3f}>"

    def confirm(self, published_at: float) -> None:
        """An announcement published at `published_at` is known to have reached the server."""
        self.expires_at = max(self.expires_at, published_at + self._good_for_s)

    def is_held(self, now: float) -> bool:
        """This process may act."""
        return now <= self.expires_at


@dataclass(frozen=True, slots=True)
class EndedIncarnation:
    """A life of a client that is over: nobody waits for its requests."""

    client: str
    incarnation: str
    reason: str
    is_closed: bool
    """It was closed in order and will not come back; False: its lease expired, or it was started anew."""


@dataclass(slots=True)
class _Lease:
    lease_s: float
    expires_at: float
    is_announced: bool


class ClientLeases:
    """Which clients live, as far as this worker has heard.

    Args:
        margin_s: by which a client's lease is exceeded before it counts as dead.
    """

    def __init__(self, margin_s: float) -> None:
        self._margin_s = margin_s
        self._live: dict[str, dict[str, _Lease]] = {}
        self._num_live = 0
        # (client, incarnation) -> whether it is over for good; an expired one may come back.
        self._dead: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<ClientLeases live={self._num_live} dead={len(self._dead)}>"

    def renew(self, presence: ClientPresence, now: float) -> list[EndedIncarnation]:
        """Take an announcement; returns the lives of this client that it ended.

        The first announcement of a life ends all others of the same client. A life that is over for good stays so.
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
        return [EndedIncarnation(client, other, "a later life of it began", is_closed=False) for other in others]

    def _close(self, client: str, incarnation: str) -> list[EndedIncarnation]:
        is_live = incarnation in self._live.get(client, {})
        has_expired = self._dead.get((client, incarnation)) is False
        self._mark_dead(client, incarnation, is_final=True)
        return (
            [EndedIncarnation(client, incarnation, "it was closed", is_closed=True)] if is_live or has_expired else []
        )

    def renew_lease(self, client: str, incarnation: str, now: float) -> None:
        """Take any other message of a client as a sign of life; it starts a lease where there was none."""
        lease = self._find_or_start(client, incarnation, now)
        if lease is not None:
            lease.expires_at = now + lease.lease_s

    def start_lease(self, client: str, incarnation: str, now: float) -> None:
        """Start a lease for a client not heard of yet: a request of it was in the queue.

        It may have waited there for long, so it is no sign of life: a lease that runs is not renewed by it.
        """
        if incarnation not in self._live.get(client, {}) and not self.is_dead(client, incarnation):
            self._find_or_start(client, incarnation, now)

    def _find_or_start(self, client: str, incarnation: str, now: float) -> _Lease | None:
        """The lease of this life, made where there is none; None where the life is over or there are too many."""
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
        self._live.setdefault(client, {})[incarnation] = lease
        self._num_live += 1
        return lease

    def expire(self, now: float) -> list[EndedIncarnation]:
        """End the lives whose lease ran out more than the margin ago; each comes back if it is heard again."""
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

    def restart_leases(self, now: float) -> None:
        """Start every lease anew: while our own connection was down, nobody could be heard."""
        for leases in self._live.values():
            for lease in leases.values():
                lease.expires_at = now + lease.lease_s

    def is_dead(self, client: str, incarnation: str) -> bool:
        """Nobody waits for the requests of this life: it was closed, has expired, or a later one began."""
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
