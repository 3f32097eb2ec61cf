"""The requests of groups that wait at a worker for its next free slots. Time is passed in; nothing here waits.

One request of a group has its turn: from the queue, or as a placed one. It is the *leader*. The others are *followers*:
they may wait here, as the worker computes their prompt anyway. A full fleet so takes group after group, slot by slot.

Invariants: a group has at most `MAX_FOLLOWERS` followers for each of its leaders, as its client could else pass the
queue. Followers begin in the order in which they came. None waits while `STALLED_S` pass in which none begins.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ....schemas.request import Lane

__all__ = ["MAX_FOLLOWERS", "STALLED_S", "FollowerBacklog", "is_behind"]

MAX_FOLLOWERS: Final = 31
"""Followers of one leader, about as many as groups have: so many slots a request of the queue waits longer at most."""
STALLED_S: Final = 2.0
"""How long followers wait while none begins: about what another worker needs to compute a long prompt."""
MAX_GROUPS: Final = 1024
"""Groups whose leaders are remembered; the least recent goes first, and its followers go to the queue."""
LEADERS_SEEN: Final = 8
"""Leaders over which `mean_followers` is a mean."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Waiting:
    lane: Lane
    came_at: float


class FollowerBacklog(Generic[K]):
    """The followers that wait at one worker."""

    def __init__(self) -> None:
        self._waiting: dict[K, _Waiting] = {}
        # By client and group: followers that may still come. Least recent leader first.
        self._allowed: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._began_at = -math.inf
        self.mean_followers = 0.0
        """How many followers came with a leader, of late; requests without followers count as leaders."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<FollowerBacklog waiting={len(self)} groups={len(self._allowed)}>"

    def __len__(self) -> int:
        """Followers that wait."""
        return len(self._waiting)

    def add_leader(self, client: str, group: str) -> None:
        """Count a request that had its turn: others of its group may follow."""
        self._allowed[client, group] = MAX_FOLLOWERS
        self._allowed.move_to_end((client, group))
        if len(self._allowed) > MAX_GROUPS:
            self._allowed.popitem(last=False)
        self.mean_followers -= self.mean_followers / LEADERS_SEEN

    def admit(self, client: str, group: str, *, capacity: int) -> bool:
        """Return True if one more follower of a group may come, and count it.

        Args:
            capacity: followers that may wait besides those that do.
        """
        allowed = self._allowed.get((client, group), 0)
        if allowed <= 0 or capacity <= 0:
            return False
        self._allowed[client, group] = allowed - 1
        self.mean_followers += 1 / LEADERS_SEEN
        return True

    def add(self, key: K, lane: Lane, now: float) -> None:
        """Have an admitted follower wait."""
        self._waiting[key] = _Waiting(lane, now)

    def pop(self, lanes_waiting: Collection[Lane] | None, now: float) -> K | None:
        """Return the follower that gets a free slot; None: none waits, or a more urgent request of the queue does.

        Args:
            lanes_waiting: what the worker knows of its queue.
        """
        for key, waiting in self._waiting.items():
            if not is_behind(waiting.lane, lanes_waiting):
                del self._waiting[key]
                self._began_at = now
                return key
        return None

    def num_due(self, lanes_waiting: Collection[Lane] | None) -> int:
        """Return how many free slots belong to followers: those that `pop` would give in turn."""
        return sum(not is_behind(waiting.lane, lanes_waiting) for waiting in self._waiting.values())

    def remove(self, keys: Iterable[K]) -> None:
        """Forget followers that have ended; without effect on what does not wait."""
        for key in keys:
            self._waiting.pop(key, None)

    def pop_stalled(self, now: float) -> list[K]:
        """Return the followers that have waited in vain."""
        since = now - STALLED_S
        if self._began_at > since:
            return []
        stalled = [key for key, waiting in self._waiting.items() if waiting.came_at <= since]
        self.remove(stalled)
        return stalled

    def pop_all(self) -> list[K]:
        """Return all that wait."""
        keys = list(self._waiting)
        self._waiting.clear()
        return keys


def is_behind(lane: Lane, lanes_waiting: Collection[Lane] | None) -> bool:
    """Return True if more urgent requests than those of `lane` are known to wait in the queue."""
    waiting = lanes_waiting or ()
    return (lane != "high" and "high" in waiting) or (lane == "low" and "normal" in waiting)
