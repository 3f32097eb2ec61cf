"""Decides which requests get the free slots of a worker: requests of the queue, placed requests, or waiting followers.

The caller passes in the time; nothing here waits.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

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
MAX_IN_TURN: Final = 8
"""Placed requests that may follow each other after as many requests of the queue: a group of samples. A request of the
queue waits for at most this many more slots.
"""
ASKED_S: Final = 1.0
"""Seconds for which a client that placed a request has a share. It tries one worker once, and returns with its next
request.
"""
Turn = Literal["queued", "placed"]
"""The turn in which a follower begins: that of its leader from the queue, or one of the placed requests."""
Lanes = Collection[Lane] | None
"""The lanes in which requests wait, as far as the worker knows; empty: the queue is empty; None: not known."""
K = TypeVar("K", bound=Hashable)


class SlotRequest(NamedTuple):
    """The attributes of a request that matter for its turn."""

    client: str
    lane: Lane
    group: str | None = None
    """Its group, if it may lead others of this group or wait behind them."""


class _Share(msgspec.Struct):
    given: int
    """Admitted placed requests of the client. A new client starts with the lowest number of the other clients."""
    asked_at: float


class _Leader(msgspec.Struct):
    turn: Turn
    until: float
    num_left: int = MAX_FOLLOWERS
    """Followers that may still arrive, until that time."""


class _Follower(msgspec.Struct):
    request: SlotRequest
    turn: Turn
    came_at: float


class SlotTurns(Generic[K]):
    """The turns of one worker: those of the queue, those of placed requests, and the followers that share them.

    One request of a group has its turn, from the queue or as a placed request. This request is the *leader*. The others
    are *followers*: they may wait here, because the worker computes their prompt anyway. So a full fleet serves group
    after group, slot by slot. Followers of a leader from the queue share its turn. Placed requests lead only while the
    queue is known to be empty, and their followers begin in the turns of placed requests. So a client can use neither
    kind of follower to bypass the queue.

    A message of the queue gives its client a slot, and one more for each follower of its request: 32 at most. Clients
    of this library count followers against their share of the queue, but a worker does not rely on that. It knows how
    many messages wait in a lane, and how many slots each of the last messages gave. The product estimates the slots of
    each client in the lane.

    Invariants:

    - While requests wait in the queue, the worker admits at most one more placed request than requests of the queue,
      and none while more urgent requests wait.
    - While the worker does not know if requests wait, placed requests get at most half of its free slots, or the only
      slot. A worker whose slots all belong to placed requests pulls nothing, and would never know.
    - While the queue is known to be empty, the worker admits all placed requests.
    - No client gets more than its share of placed requests while another client asks for some.
    - Each turn of the queue gives its client at most `MAX_FOLLOWERS` followers, within `FOLLOW_S`. A client gets no
      follower if its requests in the lane and their followers would exceed `MAX_AHEAD`.
    - While requests wait in the queue, a placed request gives no followers. Turns of sessions may wait even then: they
      begin in the turns of placed requests too.
    - Followers of one kind begin in the order of their arrival. A follower waits at most `STALLED_S` while no follower
      of its lane begins.
    """

    def __init__(self) -> None:
        # Placed requests that may begin before the next turn of the queue.
        self._num_turns = 1
        # Placed requests that were admitted since the worker last knew the state of the queue.
        self._num_unseen = 0
        # By client, in the order in which they last asked for a placed request.
        self._shares: OrderedDict[str, _Share] = OrderedDict()
        # By client, in the order of their last slot through the queue: the number of slots, of which each counts less
        # with each later message, and the number of the message at which the slots had that value.
        self._slots: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._num_messages = 0
        self._num_behind: dict[Lane, int] = {}
        # In the order of their last turn.
        self._leaders: OrderedDict[SlotRequest, _Leader] = OrderedDict()
        self._followers: dict[K, _Follower] = {}
        # The time at which a follower of each lane last began.
        self._began_at: dict[Lane, float] = {}
        self.mean_followers = 0.0
        """The recent mean number of followers per leader. Requests without followers count as leaders."""

    def __len__(self) -> int:
        """Return the number of followers that wait."""
        return len(self._followers)

    def count_queued(self, request: SlotRequest, waiting: Lanes, now: float, *, num_behind: int) -> None:
        """Count an admitted request of the queue. Others of its group and lane may follow.

        The next turn belongs to a placed request.

        Args:
            num_behind: messages that wait behind its own in the lane.
        """
        self._num_unseen = max(self._num_unseen - 1, 0)
        if _is_empty(waiting):
            self._restart()
        else:
            self._num_turns = min(self._num_turns + 1, MAX_IN_TURN)
        self._num_messages += 1
        self._num_behind[request.lane] = num_behind
        self._count_slot(request.client)
        self._add_leader(request, "queued", now)

    def admit(
        self, request: SlotRequest, waiting: Lanes, *, num_free: int, capacity: int, now: float
    ) -> Turn | Literal["now"] | None:
        """Return when a placed request begins, and count it; None: it must go to the queue.

        Args:
            num_free: slots that it might get now.
            capacity: the number of further followers that may wait.
        """
        leader = self._leaders.get(request)
        if leader is not None and capacity > 0 and self._may_follow(request, leader, waiting, now):
            leader.num_left -= 1
            self.mean_followers += 1 / LEADERS_SEEN
            if leader.turn == "queued":
                self._count_slot(request.client)
            if not _is_empty(waiting):
                # Placed requests of other clients go before those of this client.
                self._ask(request.client, now).given += 1
            return leader.turn
        if num_free <= 0 or not self._may_begin(request, waiting, num_free, now):
            return None
        self._take_turn(request.client, waiting, now)
        if request.group is not None and _is_empty(waiting):
            # While requests wait in the queue, followers of placed requests would let a client bypass the queue.
            self._add_leader(request, "placed", now)
        return "now"

    def keep(self, request: SlotRequest, waiting: Lanes, *, capacity: int, now: float) -> Turn | None:
        """Return when a turn of a session begins that `admit` did not admit; None: it must go to the queue.

        It waits like a follower of a placed request, because this worker has the earlier turns in its prefix cache.

        Args:
            capacity: the number of further turns of sessions that may wait.
        """
        return "placed" if capacity > 0 and self._may_ask(request, waiting, now) else None

    def add(self, key: K, request: SlotRequest, turn: Turn, now: float) -> None:
        """Let an admitted follower wait."""
        self._followers[key] = _Follower(request, turn, now)

    def num_due(self, waiting: Lanes, num_free: int) -> int:
        """Return how many of `num_free` slots belong to followers: as many as repeated calls of `pop` would return."""
        turns = [one.turn for one in self._followers.values() if not _is_behind(one.request.lane, waiting)]
        num_placed = min(turns.count("placed"), self._count_placed(waiting, num_free))
        return min(turns.count("queued") + num_placed, num_free)

    def pop(self, waiting: Lanes, num_free: int, now: float) -> K | None:
        """Return the follower that gets one of `num_free` slots; None: none waits, or the slot belongs to the queue."""
        num_placed = self._count_placed(waiting, num_free)
        for key, follower in self._followers.items():
            client, lane, _ = follower.request
            if _is_behind(lane, waiting) or (follower.turn == "placed" and num_placed <= 0):
                continue
            del self._followers[key]
            self._began_at[lane] = now
            if follower.turn == "placed":
                self._take_turn(client, waiting, now)
            return key
        return None

    def remove(self, keys: Iterable[K]) -> None:
        """Remove followers that have ended; without effect on keys that do not wait."""
        for key in keys:
            self._followers.pop(key, None)

    def pop_stalled(self, now: float) -> list[K]:
        """Remove and return the followers that have waited too long."""
        since = now - STALLED_S
        stalled = [
            key
            for key, follower in self._followers.items()
            if max(follower.came_at, self._began_at.get(follower.request.lane, -math.inf)) <= since
        ]
        self.remove(stalled)
        return stalled

    def pop_all(self) -> list[K]:
        """Remove and return all followers."""
        keys = list(self._followers)
        self._followers.clear()
        return keys

    # The turns of placed requests.

    def _count_placed(self, waiting: Lanes, num_free: int) -> int:
        """Return how many of `num_free` slots placed requests may get before the next turn of the queue."""
        if waiting is None:
            return max((num_free - self._num_unseen + 1) // 2, 0)
        return min(self._num_turns, num_free) if waiting else num_free

    def _may_begin(self, request: SlotRequest, waiting: Lanes, num_free: int, now: float) -> bool:
        """Return True if a placed request gets one of `num_free` slots, at least one."""
        may_ask = self._may_ask(request, waiting, now)
        return _is_empty(waiting) or (may_ask and self._count_placed(waiting, num_free) > 0)

    def _may_ask(self, request: SlotRequest, waiting: Lanes, now: float) -> bool:
        """Return True if no more urgent requests wait, and its client has no more than its share."""
        if _is_empty(waiting):
            return True
        share = self._ask(request.client, now)
        if waiting:
            self._num_unseen = 0
        is_behind = _is_behind(request.lane, waiting) or "high" in (waiting or ())
        return not is_behind and share.given <= min(other.given for other in self._shares.values())

    def _take_turn(self, client: str, waiting: Lanes, now: float) -> None:
        """Count a placed request that begins."""
        if _is_empty(waiting):
            self._restart()
            return
        self._num_unseen += waiting is None
        self._num_turns = max(self._num_turns - 1, 0)
        self._ask(client, now).given += 1

    def _restart(self) -> None:
        self._num_turns, self._num_unseen = 1, 0
        self._shares.clear()

    def _ask(self, client: str, now: float) -> _Share:
        """Return the share of a client, and remove the shares of clients that have not asked for a while."""
        share = self._shares.pop(client, None)
        while self._shares and next(iter(self._shares.values())).asked_at <= now - ASKED_S:
            self._shares.popitem(last=False)
        if share is None or share.asked_at <= now - ASKED_S:
            share = _Share(min((other.given for other in self._shares.values()), default=0), now)
        share.asked_at = now
        self._shares[client] = share
        if len(self._shares) > MAX_CLIENTS:
            self._shares.popitem(last=False)
        return share

    # Leaders and their followers.

    def _add_leader(self, request: SlotRequest, turn: Turn, now: float) -> None:
        self._leaders[request] = _Leader(turn, now + FOLLOW_S)
        self._leaders.move_to_end(request)
        if len(self._leaders) > MAX_GROUPS:
            self._leaders.popitem(last=False)
        self.mean_followers -= self.mean_followers / LEADERS_SEEN

    def _may_follow(self, request: SlotRequest, leader: _Leader, waiting: Lanes, now: float) -> bool:
        if request.group is None or now >= leader.until or leader.num_left <= 0:
            return False
        if leader.turn == "placed":
            return _is_empty(waiting)
        num_each = self._count_recent_slots(request.client) / MESSAGES_SEEN
        return self._num_behind.get(request.lane, 0) * num_each <= MAX_AHEAD

    def _count_slot(self, client: str) -> None:
        """Count a slot that a client gets through the queue."""
        self._slots[client] = self._count_recent_slots(client) + 1, self._num_messages
        self._slots.move_to_end(client)
        if len(self._slots) > MAX_CLIENTS:
            self._slots.popitem(last=False)

    def _count_recent_slots(self, client: str) -> float:
        num_slots, at = self._slots.get(client, (0.0, 0))
        return num_slots * (1 - 1 / MESSAGES_SEEN) ** (self._num_messages - at)


def _is_empty(waiting: Lanes) -> bool:
    return waiting is not None and not waiting


def _is_behind(lane: Lane, waiting: Lanes) -> bool:
    """Return True if requests that are more urgent than those of `lane` are known to wait in the queue."""
    lanes = waiting or ()
    return (lane != "high" and "high" in lanes) or (lane == "low" and "normal" in lanes)
