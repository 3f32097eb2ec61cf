"""Decides which requests get the free slots of a worker: requests of the queue, placed requests, or waiting followers.

`IntakeShares` has the turns of the queue and of placed requests. `FollowerBacklog` has the requests that wait behind
others of their group, and `FollowerShares` limits them. `SlotTurns` combines these. The caller passes in the time;
nothing here waits.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from ....schemas.request import Lane

MAX_AHEAD: Final = 2048
"""Slots of a client in a lane. Twice the default queue share of a client, because the last messages are only a sample.
"""
MESSAGES_SEEN: Final = 64
"""Messages over which the slots of each client are a mean. Older messages count less."""
MAX_CLIENTS: Final = 256
"""Clients that are counted separately. Above this number, those without a slot for the longest time, or that
asked least recently, count as new."""
MAX_FOLLOWERS: Final = 31
"""Followers of one leader, about as many as groups have. A request of the queue waits for at most this many more slots.
"""
FOLLOW_S: Final = 2.0
"""Seconds after its turn in which a leader may get followers: its client sends them after it learns of the turn."""
STALLED_S: Final = 2.0
"""Seconds that followers wait while no follower of their lane begins: about the time that another worker needs for a
long prompt.
"""
MAX_GROUPS: Final = 1024
"""Groups whose leaders are remembered. The group whose last leader is the oldest is removed first, and its later
followers go to the queue.
"""
LEADERS_SEEN: Final = 8
"""Leaders in the mean of `mean_followers`."""
Turn = Literal["queued", "placed"]
"""The turn in which a follower begins: that of its leader from the queue, or one of the placed requests."""
K = TypeVar("K", bound=Hashable)
MAX_IN_TURN: Final = 8
"""Placed requests that may follow each other after as many requests of the queue: a group of samples. A request of the
queue waits for at most this many more slots.
"""
ASKED_S: Final = 1.0
"""Seconds for which a client that placed a request has a share. It tries one worker once, and returns with its next
request.
"""


class Begun(NamedTuple, Generic[K]):
    """A follower that gets a slot."""

    key: K
    client: str
    turn: Turn


class SlotRequest(NamedTuple):
    """The attributes of a placed request that matter for its turn."""

    client: str
    lane: Lane
    group: str | None = None
    """Its group, if it may wait behind others of this group."""


@dataclass(slots=True)
class _Leader:
    turn: Turn
    until: float
    num_left: int = MAX_FOLLOWERS
    """Followers that may still arrive, until that time."""


@dataclass(slots=True)
class _WaitingFollower:
    client: str
    lane: Lane
    turn: Turn
    came_at: float


@dataclass(slots=True)
class _ClientShare:
    given: int
    """Admitted placed requests of the client. A new client starts with the lowest number of the other clients."""
    asked_at: float


@dataclass(slots=True)
class _ClientSlots:
    num_slots: float = 0.0
    """Slots of the client. The value of each slot decreases with each later message."""
    at: int = 0
    """The number of the message at which the slots had that value."""

    def now(self, num_messages: int) -> float:
        """Return the value of the slots after so many messages."""
        return self.num_slots * (1 - 1 / MESSAGES_SEEN) ** (num_messages - self.at)


class SlotTurns(Generic[K]):
    """The turns of one worker. Each `waiting` has the lanes in which requests wait, as in `IntakeShares`."""

    def __init__(self) -> None:
        self.shares = IntakeShares()
        self.backlog: FollowerBacklog[K] = FollowerBacklog()

    def admit_placed(
        self, request: SlotRequest, waiting: Collection[Lane] | None, *, num_free: int, capacity: int, now: float
    ) -> Turn | Literal["now"] | None:
        """Return when a placed request begins, and count it; None: it must go to the queue.

        Args:
            num_free: slots that it might get now.
            capacity: the number of further followers that may wait.
        """
        client, lane, group = request
        if group is not None:
            turn = self.backlog.admit(client, group, lane, waiting, now, capacity=capacity)
            if turn is not None:
                self.shares.count_follower(client, waiting, now)
                return turn
        if num_free <= 0 or not self.shares.admit_placed(client, lane, waiting, num_free=num_free, now=now):
            return None
        if group is not None and waiting is not None and not waiting:
            # While requests wait in the queue, followers of placed requests would let a client bypass the queue.
            self.backlog.add_placed(client, group, lane, now)
        return "now"

    def num_due(self, waiting: Collection[Lane] | None, num_free: int) -> int:
        """Return how many of `num_free` slots belong to followers: as many as repeated calls of `pop` would return."""
        return min(self.backlog.num_due(waiting, self.shares.num_turns(waiting, num_free)), num_free)

    def pop(self, waiting: Collection[Lane] | None, num_free: int, now: float) -> K | None:
        """Return the follower that gets one of `num_free` slots; None: none waits, or the slot belongs to the queue."""
        begun = self.backlog.pop(waiting, self.shares.num_turns(waiting, num_free), now)
        if begun is None:
            return None
        if begun.turn == "placed":
            self.shares.count_turn(begun.client, waiting, now)
        return begun.key


class IntakeShares:
    """The turns of placed and queued requests at one worker.

    Each `waiting` has the lanes in which requests wait, as far as the worker knows; empty: the queue is empty; None:
    not known. A worker whose slots all belong to placed requests pulls nothing, and would never know.

    Invariants: while requests wait in the queue, the worker admits at most one more placed request than requests of the
    queue, and none while more urgent requests wait. While the worker does not know if requests wait, placed requests
    get at most half of its free slots, or the only slot. No client gets more than its share of placed requests while
    another client asks for some. While the queue is known to be empty, the worker admits all placed requests.
    """

    def __init__(self) -> None:
        self._num_turns = 1
        # Admitted since the worker last knew the state of the queue.
        self._num_unseen = 0
        # In the order in which they last asked.
        self._clients: OrderedDict[str, _ClientShare] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of clients that are counted separately."""
        return len(self._clients)

    def count_queued(self, waiting: Collection[Lane] | None) -> None:
        """Count an admitted request of the queue. The next turn belongs to a placed request."""
        self._num_unseen = max(self._num_unseen - 1, 0)
        if waiting is None or waiting:
            self._num_turns = min(self._num_turns + 1, MAX_IN_TURN)
        else:
            self._restart()

    def num_turns(self, waiting: Collection[Lane] | None, num_free: int) -> int:
        """Return how many of `num_free` slots placed requests may get before the next turn of the queue."""
        if waiting is None:
            return max((num_free - self._num_unseen + 1) // 2, 0)
        return min(self._num_turns, num_free) if waiting else num_free

    def admit_placed(
        self, client: str, lane: Lane, waiting: Collection[Lane] | None, *, num_free: int, now: float
    ) -> bool:
        """Return True if a placed request gets one of `num_free` slots, at least one, and count it."""
        if waiting is not None and not waiting:
            self._restart()
            return True
        share = self._ask(client, now)
        known = waiting or ()
        if known:
            self._num_unseen = 0
        is_behind = "high" in known or (lane == "low" and "normal" in known)
        is_ahead = share.given > min(other.given for other in self._clients.values())
        if is_behind or is_ahead or not self.num_turns(waiting, num_free):
            return False
        self._take_turn(share, waiting)
        return True

    def count_turn(self, client: str, waiting: Collection[Lane] | None, now: float) -> None:
        """Count a placed request that has waited and now gets one of the slots of `num_turns`."""
        if waiting is not None and not waiting:
            self._restart()
        else:
            self._take_turn(self._ask(client, now), waiting)

    def count_follower(self, client: str, waiting: Collection[Lane] | None, now: float) -> None:
        """Count a request that follows its group: placed requests of other clients go before those of its client."""
        if waiting is None or waiting:
            self._ask(client, now).given += 1

    def _take_turn(self, share: _ClientShare, waiting: Collection[Lane] | None) -> None:
        self._num_unseen += waiting is None
        self._num_turns = max(self._num_turns - 1, 0)
        share.given += 1

    def _restart(self) -> None:
        self._num_turns, self._num_unseen = 1, 0
        self._clients.clear()

    def _ask(self, client: str, now: float) -> _ClientShare:
        """Return the share of a client, and remove the shares of clients that have not asked for a while."""
        share = self._clients.pop(client, None)
        while self._clients and next(iter(self._clients.values())).asked_at <= now - ASKED_S:
            self._clients.popitem(last=False)
        if share is None or share.asked_at <= now - ASKED_S:
            share = _ClientShare(min((other.given for other in self._clients.values()), default=0), now)
        share.asked_at = now
        self._clients[client] = share
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return share


class FollowerBacklog(Generic[K]):
    """The followers that wait at one worker.

    One request of a group has its turn, from the queue or as a placed request. This request is the *leader*. The others
    are *followers*: they may wait here, because the worker computes their prompt anyway. So a full fleet serves group
    after group, slot by slot. Followers of a leader from the queue share its turn. Placed requests lead only while the
    queue is known to be empty, and their followers begin in the turns of placed requests. So a client can use neither
    kind of follower to bypass the queue.

    Invariants: each turn of the queue gives its client at most `MAX_FOLLOWERS` followers, within `FOLLOW_S`, and only
    as far as `FollowerShares` permits. While requests wait in the queue, a placed request gives no followers. Followers
    of one kind begin in the order of their arrival. A follower waits at most `STALLED_S` while no follower of its lane
    begins.
    """

    def __init__(self) -> None:
        self._waiting: dict[K, _WaitingFollower] = {}
        # By client, group and lane, in the order of their last turn.
        self._leaders: OrderedDict[tuple[str, str, Lane], _Leader] = OrderedDict()
        self._shares = FollowerShares()
        # The time at which a follower of each lane last began.
        self._began_at: dict[Lane, float] = {}
        self.mean_followers = 0.0
        """The recent mean number of followers per leader. Requests without followers count as leaders."""

    def __len__(self) -> int:
        """Return the number of followers that wait."""
        return len(self._waiting)

    def add_queued(self, client: str, group: str, lane: Lane, now: float, *, num_waiting: int) -> None:
        """Count a request of the queue. Others of its group and lane may follow.

        Args:
            num_waiting: messages that wait behind its own in the lane.
        """
        self._shares.count_message(client, lane, num_waiting)
        self._add_leader(client, group, lane, _Leader("queued", now + FOLLOW_S))

    def add_placed(self, client: str, group: str, lane: Lane, now: float) -> None:
        """Count a placed request. While the queue is known to be empty, others of its group and lane may follow."""
        self._add_leader(client, group, lane, _Leader("placed", now + FOLLOW_S))

    def _add_leader(self, client: str, group: str, lane: Lane, leader: _Leader) -> None:
        self._leaders[client, group, lane] = leader
        self._leaders.move_to_end((client, group, lane))
        if len(self._leaders) > MAX_GROUPS:
            self._leaders.popitem(last=False)
        self.mean_followers -= self.mean_followers / LEADERS_SEEN

    def admit(
        self,
        client: str,
        group: str,
        lane: Lane,
        lanes_waiting: Collection[Lane] | None,
        now: float,
        *,
        capacity: int,
    ) -> Turn | None:
        """Return the turn in which one more follower of a group may begin, and count it; None: it may not wait here.

        Args:
            lanes_waiting: the lanes in which requests wait, as far as the worker knows.
            capacity: the number of further followers that may wait.
        """
        leader = self._leaders.get((client, group, lane))
        if leader is None or now >= leader.until or leader.num_left <= 0 or capacity <= 0:
            return None
        if leader.turn == "queued":
            if not self._shares.may_follow(client, lane):
                return None
            self._shares.count_follower(client)
        elif lanes_waiting is None or lanes_waiting:
            return None
        leader.num_left -= 1
        self.mean_followers += 1 / LEADERS_SEEN
        return leader.turn

    def add(self, key: K, client: str, lane: Lane, turn: Turn, now: float) -> None:
        """Let an admitted follower wait."""
        self._waiting[key] = _WaitingFollower(client, lane, turn, now)

    def pop(self, lanes_waiting: Collection[Lane] | None, num_turns: int, now: float) -> Begun[K] | None:
        """Return the follower that gets a free slot; None: none waits, or the slot belongs to the queue.

        Args:
            lanes_waiting: the lanes in which requests wait, as far as the worker knows.
            num_turns: slots that placed requests may have now.
        """
        for key, waiting in self._waiting.items():
            if is_behind(waiting.lane, lanes_waiting) or (waiting.turn == "placed" and num_turns <= 0):
                continue
            del self._waiting[key]
            self._began_at[waiting.lane] = now
            return Begun(key, waiting.client, waiting.turn)
        return None

    def num_due(self, lanes_waiting: Collection[Lane] | None, num_turns: int) -> int:
        """Return how many free slots belong to followers: the number that repeated calls of `pop` would return."""
        turns = [waiting.turn for waiting in self._waiting.values() if not is_behind(waiting.lane, lanes_waiting)]
        return turns.count("queued") + min(turns.count("placed"), num_turns)

    def remove(self, keys: Iterable[K]) -> None:
        """Remove followers that have ended; without effect on keys that do not wait."""
        for key in keys:
            self._waiting.pop(key, None)

    def pop_stalled(self, now: float) -> list[K]:
        """Remove and return the followers that have waited too long."""
        since = now - STALLED_S
        stalled = [
            key
            for key, waiting in self._waiting.items()
            if max(waiting.came_at, self._began_at.get(waiting.lane, -math.inf)) <= since
        ]
        self.remove(stalled)
        return stalled

    def pop_all(self) -> list[K]:
        """Remove and return all followers."""
        keys = list(self._waiting)
        self._waiting.clear()
        return keys


class FollowerShares:
    """The slots that clients have through the queue, as far as one worker knows.

    A message of the queue gives its client a slot, and one more for each follower of its request: 32 at most. So a
    client with its full share of the queue could get 32 times as many slots before the next client's request. Clients
    of this library count followers against their share themselves, but a worker does not rely on that. The worker knows
    how many messages wait in a lane, and how many slots each of the last messages gave. The product estimates the slots
    of each client in the lane.

    Invariant: a client gets no follower if its requests in the lane and their followers would exceed `MAX_AHEAD`.
    """

    def __init__(self) -> None:
        self._num_messages = 0
        self._num_waiting: dict[Lane, int] = {}
        # In the order of their last slot.
        self._clients: OrderedDict[str, _ClientSlots] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of clients that are counted separately."""
        return len(self._clients)

    def count_message(self, client: str, lane: Lane, num_waiting: int) -> None:
        """Count a message of the queue, and the number of messages that wait behind it in its lane."""
        self._num_messages += 1
        self._num_waiting[lane] = num_waiting
        self._add_slot(client)

    def count_follower(self, client: str) -> None:
        """Count a slot that a client gets through one of its messages."""
        self._add_slot(client)

    def may_follow(self, client: str, lane: Lane) -> bool:
        """Return True if a client with requests in a lane may get another follower there."""
        slots = self._clients.get(client)
        if slots is None:
            return True
        each = slots.now(self._num_messages) / MESSAGES_SEEN
        return self._num_waiting.get(lane, 0) * each <= MAX_AHEAD

    def _add_slot(self, client: str) -> None:
        slots = self._clients.pop(client, _ClientSlots())
        self._clients[client] = _ClientSlots(slots.now(self._num_messages) + 1, self._num_messages)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)


def is_behind(lane: Lane, lanes_waiting: Collection[Lane] | None) -> bool:
    """Return True if requests that are more urgent than those of `lane` are known to wait in the queue."""
    waiting = lanes_waiting or ()
    return (lane != "high" and "high" in waiting) or (lane == "low" and "normal" in waiting)
