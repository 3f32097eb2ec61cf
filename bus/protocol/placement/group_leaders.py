"""Decides which requests of a group follow another request, their *leader*, to the worker that admits the leader.

The queue would spread the requests of a group over all workers, and each worker would compute their prompt. So only the
leader goes to the queue. Its followers go to the worker that admits it. If no worker admits it, they get another
leader.

A leader in the queue also represents its followers. So leader and followers count together against the client's share
of a lane. Groups beyond the share wait in the client, in order. Otherwise a client's share would be about ten times as
long.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Final, Generic, TypeVar, get_args

from ....schemas.request import Lane

__all__ = ["MAX_AHEAD", "GroupLeaders"]

MAX_AHEAD: Final = 1024
"""The maximum of leaders and followers of one lane that no worker has admitted: the default queue share of a client."""

K = TypeVar("K", bound=Hashable)


class GroupLeaders(Generic[K]):
    """The leaders of one client and model that no worker has admitted yet, bounded by its requests in flight.

    Args:
        max_ahead: leaders and followers of one lane at which no further request begins to lead.
    """

    def __init__(self, max_ahead: int = MAX_AHEAD) -> None:
        self._max_ahead = max_ahead
        # Followers in order of arrival, by their leader.
        self._followers: dict[K, dict[K, None]] = {}
        self._leader_of: dict[K, K] = {}
        # By group: its last leader, and the group of each of these leaders.
        self._last: dict[int, K] = {}
        self._group_of: dict[K, int] = {}
        # The lane of each leader and follower, and their number by lane.
        self._lane_of: dict[K, Lane] = {}
        self._ahead: Counter[Lane] = Counter()
        self.queued: set[K] = set()
        """The leaders that the caller has sent to the queue. The caller adds them, `remove` removes them."""
        # By lane, in order of arrival: group and limit of the requests that wait until they may lead or follow.
        self._waiting: dict[Lane, dict[K, tuple[int, int]]] = {lane: {} for lane in get_args(Lane)}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<GroupLeaders leaders={len(self._followers)} waiting={len(self)}>"

    def __len__(self) -> int:
        """Return the number of requests that follow, or wait until they may lead or follow."""
        return len(self._leader_of) + sum(map(len, self._waiting.values()))

    def __contains__(self, key: K) -> bool:
        """Return True if the request follows, or waits until it may lead or follow."""
        return key in self._leader_of or any(key in waiting for waiting in self._waiting.values())

    @property
    def is_empty(self) -> bool:
        """True if no request leads, follows or waits."""
        return not self._followers and not len(self)

    @property
    def has_due(self) -> bool:
        """True if `pop_due` would return requests or add followers."""
        return any(waiting and self._ahead[lane] < self._max_ahead for lane, waiting in self._waiting.items())

    def leads(self, key: K) -> bool:
        """Return True if the request is, or was, the leader of its group, and no worker has admitted it."""
        return key in self._followers

    def add_leader(self, group: int, key: K, lane: Lane) -> None:
        """Make a request the leader of its group."""
        before = self._last.get(group)
        if before is not None:
            del self._group_of[before]
        self._followers[key] = {}
        self._last[group], self._group_of[key] = key, group
        self._count(key, lane)

    def add(self, group: int, key: K, lane: Lane, limit: int) -> bool:
        """Let a request follow the last leader of its group, or lead, or wait until it may.

        Args:
            limit: followers of one leader.

        Returns:
            True if it leads: the caller publishes it.
        """
        if self._follow(group, key, lane, limit):
            return False
        if self._waiting[lane] or self._ahead[lane] >= self._max_ahead:
            self._waiting[lane][key] = group, limit
            return False
        self.add_leader(group, key, lane)
        return True

    def pop_due(self) -> list[K]:
        """Return the requests that waited and lead now, for the caller to publish.

        Others of their groups follow them.
        """
        due: list[K] = []
        for lane, waiting in self._waiting.items():
            while waiting and self._ahead[lane] < self._max_ahead:
                key = next(iter(waiting))
                group, limit = waiting.pop(key)
                if not self._follow(group, key, lane, limit):
                    self.add_leader(group, key, lane)
                    due.append(key)
        return due

    def remove(self, key: K) -> list[K]:
        """Remove a request, whether it leads, follows or waits. Return its followers, in order."""
        self.queued.discard(key)
        for waiting in self._waiting.values():
            waiting.pop(key, None)
        leader = self._leader_of.pop(key, None)
        if leader is not None:
            del self._followers[leader][key]
        followers = list(self._followers.pop(key, ()))
        for gone in (key, *followers):
            self._leader_of.pop(gone, None)
            if gone in self._lane_of:
                self._ahead[self._lane_of.pop(gone)] -= 1
        group = self._group_of.pop(key, None)
        if group is not None:
            del self._last[group]
        return followers

    def _follow(self, group: int, key: K, lane: Lane, limit: int) -> bool:
        leader = self._last.get(group)
        if leader is None or len(self._followers[leader]) >= limit:
            return False
        self._followers[leader][key] = None
        self._leader_of[key] = leader
        self._count(key, lane)
        return True

    def _count(self, key: K, lane: Lane) -> None:
        self._lane_of[key] = lane
        self._ahead[lane] += 1
