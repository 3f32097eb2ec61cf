"""Which requests of groups follow another one, their *leader*, to the worker that admits it.

In the queue the requests of a group would be spread over all workers, each of which computes their prompt. So only the
leader goes there. Its followers go to the worker that admits it; without one, they find another leader.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["GroupLeaders"]

K = TypeVar("K", bound=Hashable)


class GroupLeaders(Generic[K]):
    """The leaders of one client and model that no worker has admitted yet. Bounded by its requests in flight."""

    def __init__(self) -> None:
        # Followers in order of arrival, by their leader.
        self._followers: dict[K, dict[K, None]] = {}
        self._leader_of: dict[K, K] = {}
        # By group: its last leader, and the group of each of these.
        self._last: dict[int, K] = {}
        self._group_of: dict[K, int] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<GroupLeaders leaders={len(self._followers)} waiting={len(self)}>"

    def __len__(self) -> int:
        """Requests that follow."""
        return len(self._leader_of)

    def __contains__(self, key: K) -> bool:
        """It follows."""
        return key in self._leader_of

    def leads(self, key: K) -> bool:
        """Return True if it is, or was, the leader of its group, and no worker has admitted it."""
        return key in self._followers

    def add_leader(self, group: int, key: K) -> None:
        """Have a request lead a group from now on."""
        before = self._last.get(group)
        if before is not None:
            del self._group_of[before]
        self._followers[key] = {}
        self._last[group], self._group_of[key] = key, group

    def follow(self, group: int, key: K, limit: int) -> bool:
        """Have a request follow the last leader of its group; False: there is none, or it has `limit` followers."""
        leader = self._last.get(group)
        if leader is None or len(self._followers[leader]) >= limit:
            return False
        self._followers[leader][key] = None
        self._leader_of[key] = leader
        return True

    def remove(self, key: K) -> list[K]:
        """It leads and follows no longer; returns those that followed it, in order."""
        leader = self._leader_of.pop(key, None)
        if leader is not None:
            del self._followers[leader][key]
        followers = list(self._followers.pop(key, ()))
        for follower in followers:
            del self._leader_of[follower]
        group = self._group_of.pop(key, None)
        if group is not None:
            del self._last[group]
        return followers
