"""Decides by what arrives who still holds an id, a request or a transfer. The caller passes in the time; no I/O."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from ....schemas.control import AnyCommand, FinishWeightUpdate
from ....schemas.errors import ControlCode, ControlError
from ....schemas.options import DEFAULT_LEASE_S
from ....schemas.presence import ClientPresence, ClientState, WorkerPresence, WorkerState
from ....schemas.weights import OpenTransfer

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
MAX_FROM_ONE: Final = 500
"""Messages of one sender in a second, far above any honest sender. Reading as many takes a percent of a core."""
MAX_FROM_ALL: Final = 5_000
"""Messages of all senders in a second. Thousands of clients may connect at once, and each publishes presence. On a
server with users, nobody has several names."""
DROP_S: Final = 5.0
"""Seconds for which a flooded subscription is dropped."""
LEASE_MARGIN_S: Final = 1.0
"""Seconds. A worker fences itself this long before the end of its own lease. It treats a peer as lost this long after
the end of the peer's lease, and so do clients: by then a worker has fenced itself by any clock."""
MAX_LEASE_S = 60.0
"""The maximum lease in seconds, even if presence states more: data that a lost client or worker leaves must expire."""
MAX_CLIENTS = 65_536
"""The number of live client incarnations, and also that of remembered dead ones. The oldest dead ones are removed."""
MAX_INCARNATIONS = 8
"""The number of live incarnations of one client name. Each presence of a new one ends the others, so more than two mean
messages with invented incarnations. The one that was first heard longest ago ends, unless it has published presence.
"""
OWNER_LOST_S: Final = 20.0
"""Seconds without presence after which the owner counts as lost: several leases, since its engines then load weights
again."""
ENDED: Final = frozenset({ControlCode.NOT_FOUND, ControlCode.TRANSFER_EXPIRED, ControlCode.TRANSFER_EMPTY})
"""Errors of a finish on a worker that has not received the weights. It waits for the next update."""


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

    Two processes get the same id from copied credentials or from a templated `--worker-id`. The worker that has held
    the id longer, without a lost lease, keeps the id. The other worker gives way, but not at the first presence
    message: a worker that is being stopped still publishes presence for a moment.

    Invariant: of two workers that receive each other's presence, never both give way. A worker reports how long it has
    held the id at the moment of publishing, so that the other worker never overestimates this time.

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


class FloodMeter:
    """Counts the messages of one subscription in each second.

    Args:
        num_useful: returns the number of messages since the start that were worth their cost, for example accepted
            requests. These do not count.
    """

    def __init__(self, num_useful: Callable[[], int] = lambda: 0) -> None:
        self._num_useful = num_useful
        self._counts: Counter[str] = Counter()
        self._num_messages = self._useful_before = 0
        self._ends_at = 0.0
        self.is_flooded = False
        """True from the flood on until `reset`."""

    def reset(self, now: float) -> None:
        """Begin a new second."""
        self._counts.clear()
        self._num_messages, self._useful_before = 0, self._num_useful()
        self._ends_at, self.is_flooded = now + 1.0, False

    def add(self, subject: str, now: float) -> bool:
        """Count a message on `subject`, which has the name of its sender. Return True if it makes a flood."""
        if now >= self._ends_at:
            self.reset(now)
        self._counts[subject] += 1
        self._num_messages += 1
        above = max(self._counts[subject] - MAX_FROM_ONE, self._num_messages - MAX_FROM_ALL)
        self.is_flooded = above > 0 and above > self._num_useful() - self._useful_before
        return self.is_flooded

    def describe(self, subscription: str) -> str:
        """Return the flood as text for people, with the subject that most messages had."""
        (subject, count), *_ = self._counts.most_common(1) or [(subscription, 0)]
        return f"{count} of {self._num_messages} messages in a second on {subject}: not read for {DROP_S:g} s"


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

    def __len__(self) -> int:
        """Return the number of live incarnations of clients."""
        return self._num_live

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
        others = [
            EndedIncarnation(client, other, "a later incarnation of it began")
            for other in self._live[client]
            if other != incarnation
        ]
        for ended in others:
            self._mark_dead(client, ended.incarnation, is_final=True)
        return others

    def _close(self, client: str, incarnation: str) -> list[EndedIncarnation]:
        is_live = incarnation in self._live.get(client, {})
        has_expired = self._dead.get((client, incarnation)) is False
        self._mark_dead(client, incarnation, is_final=True)
        return [EndedIncarnation(client, incarnation, "it was closed")] if is_live or has_expired else []

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
            EndedIncarnation(client, incarnation, "its lease expired")
            for client, leases in self._live.items()
            for incarnation, lease in leases.items()
            if lease.expires_at + self._margin_s <= now
        ]
        for ended in late:
            self._mark_dead(ended.client, ended.incarnation, is_final=False)
        return late

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


@dataclass(slots=True)
class TransferLease:
    """The lease of one open transfer. All times are monotonic.

    The owner is a client of the bus, or a user of the HTTP service on whichever service. The lease ends if no command
    arrives for the idle limit, or if a client of the bus is silent for `OWNER_LOST_S`.

    Attributes:
        id: id of the transfer.
        by: its owner.
        heard_at: time of the owner's last presence; None: no presence was received, as of a plain NATS program.
        is_busy: True while the engine executes a command of the transfer.
    """

    id: str
    by: str
    started_at: float
    last_command_at: float
    heard_at: float | None = None
    chunks: int = 0
    is_busy: bool = False

    def note_presence(self, heard_at: float | None) -> None:
        """Handle the time of the owner's last presence; None: there is none now."""
        if heard_at is not None:
            self.heard_at = max(heard_at, self.heard_at or heard_at)

    def loss(self, now: float) -> str | None:
        """Return the text that the owner is lost, or None. This ends also a command in progress."""
        if self.heard_at is None or now - self.heard_at <= OWNER_LOST_S:
            return None
        return f"its owner, the client {self.by}, published no presence for {OWNER_LOST_S:g} s"

    def end(self, now: float, idle_s: float) -> str | None:
        """Return the reason why the lease has ended, or None."""
        if (loss := self.loss(now)) is not None:
            return loss
        if self.is_busy or now - self.last_command_at <= idle_s:
            return None
        return f"its owner, {self.by}, sent no command for {idle_s:g} s"

    def describe(self, now: float, idle_s: float) -> OpenTransfer:
        """Return the transfer as presence announces it."""
        left_s = 0.0 if self.is_busy else max(self.last_command_at + idle_s - now, 0.0)
        return OpenTransfer(
            id=self.id,
            by=self.by,
            age_s=round(max(now - self.started_at, 0.0), 3),
            left_s=round(left_s, 3),
            chunks=self.chunks,
        )


def check_continues(found: OpenTransfer | None, transfer: str | None, by: str | None) -> None:
    """Check that a command may continue the open transfer of a worker.

    Args:
        found: the open transfer; None: there is none.
        transfer: id that the command names; None: it names none.
        by: owner who sends it; None: not compared.

    Raises:
        ControlError: `transfer_expired`, `transfer_held`.
    """
    if found is None:
        problem = "no transfer of weights is open" if transfer is None else f"the transfer {transfer} is not open"
        raise ControlError(ControlCode.TRANSFER_EXPIRED, f"{problem}: start it again")
    if by not in {None, found.by}:
        raise ControlError(ControlCode.TRANSFER_HELD, f"another owner, not {by}, has {found}; a cancel ends it")
    if transfer not in {None, found.id}:
        raise ControlError(ControlCode.TRANSFER_EXPIRED, f"the transfer {transfer} is not open, but {found}")


def check_finish(found: OpenTransfer | None, command: FinishWeightUpdate, by: str | None) -> None:
    """Check that a finish may use what a worker has received.

    Raises:
        ControlError: `transfer_expired`, `transfer_held`, `transfer_empty`.
    """
    check_continues(found, command.transfer, by)
    if found is not None and not found.chunks:
        raise ControlError(ControlCode.TRANSFER_EMPTY, f"{found} cannot be finished: send the weights, or cancel it")


def check_any_can_finish(workers: Iterable[WorkerPresence], command: AnyCommand, by: str) -> None:
    """Check that at least one of these workers can apply a finish, before the finish is recorded.

    Raises:
        ControlError: as in `check_finish`, if every worker would reject it. Nothing has changed then.
    """
    if not isinstance(command, FinishWeightUpdate):
        return
    refusal: ControlError | None = None
    for worker in workers:
        if worker.capabilities is None or not worker.capabilities.transfer_leases:
            return  # a worker of an earlier release does not announce its transfer
        if worker.transfer is None and worker.weight_version == command.version:
            return  # the finish may be repeated
        try:
            check_finish(worker.transfer, command, by)
        except ControlError as error:
            if refusal is None or refusal.code is ControlCode.TRANSFER_EXPIRED:
                refusal = error
        else:
            return
    if refusal is not None:
        raise ControlError(refusal.code, f"nothing was changed: {refusal.message}")
