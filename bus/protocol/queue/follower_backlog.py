"""The requests of groups that wait at a worker for its next free slots. The caller passes in the time; nothing waits.

One request of a group has its turn, from the queue or as a placed request. This request is the *leader*. The others are
*followers*: they may wait here, because the worker computes their prompt anyway. So a full fleet serves group after
group, slot by slot. Followers of a leader from the queue share its turn. Placed requests lead only while the queue is
known to be empty, and their followers begin in the turns of placed requests. So a client can use neither kind of
follower to bypass the queue.

Invariants: each turn of the queue gives its client at most `MAX_FOLLOWERS` followers, within `FOLLOW_S`, and only as
far as `FollowerShares` permits. While requests wait in the queue, a placed request gives no followers. Followers of one
kind begin in the order of their arrival. A follower waits at most `STALLED_S` while no follower of its lane begins.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from ....schemas.request import Lane
from .follower_shares import FollowerShares

__all__ = ["FOLLOW_S", "MAX_FOLLOWERS", "STALLED_S", "Begun", "FollowerBacklog", "Turn", "is_behind"]

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


class Begun(NamedTuple, Generic[K]):
    """A follower that gets a slot."""

    key: K
    client: str
    turn: Turn


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


class FollowerBacklog(Generic[K]):
    """The followers that wait at one worker."""

    def __init__(self) -> None:
        self._waiting: dict[K, _WaitingFollower] = {}
        # By client, group and lane, in the order of their last turn.
        self._leaders: OrderedDict[tuple[str, str, Lane], _Leader] = OrderedDict()
        self._shares = FollowerShares()
        # The time at which a follower of each lane last began.
        self._began_at: dict[Lane, float] = {}
        self.mean_followers = 0.0
        """The recent mean number of followers per leader. Requests without followers count as leaders."""

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<FollowerBacklog waiting={len(self)} groups={len(self._leaders)}>"

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


def is_behind(lane: Lane, lanes_waiting: Collection[Lane] | None) -> bool:
    """Return True if requests that are more urgent than those of `lane` are known to wait in the queue."""
    waiting = lanes_waiting or ()
    return (lane != "high" and "high" in waiting) or (lane == "low" and "normal" in waiting)
