"""Requests of one group that wait for the worker of the first of them. Time is passed in; nothing here waits.

The first request of a group that computes their prompt is its leader. Others for which there was no room follow it:
they wait until it has a token, and so a worker on which the prompt is cached, but for a bounded time.

Invariant: a request is a leader, or follows one leader, or is not here.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["FOLLOW_S", "Followers"]

FOLLOW_S: Final = 2.0
"""How long a request waits for the worker of its group: about what a worker needs for a long prompt itself."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Following(Generic[K]):
    leader: K
    until: float


class Followers(Generic[K]):
    """The groups of one client of which no request has a token yet. Bounded by its requests in flight."""

    def __init__(self) -> None:
        self._leaders: dict[Hashable, K] = {}
        self._groups: dict[K, Hashable] = {}
        # In the order of their deadlines: all wait equally long.
        self._following: dict[K, _Following[K]] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Followers leaders={len(self._leaders)} following={len(self._following)}>"

    def __len__(self) -> int:
        """Requests that follow another."""
        return len(self._following)

    def __contains__(self, key: K) -> bool:
        """It follows another."""
        return key in self._following

    def leader(self, group: Hashable) -> K | None:
        """The leader of a group; None: it has none, or that has a token, or is gone."""
        return self._leaders.get(group)

    def lead(self, group: Hashable, key: K) -> None:
        """Make a request the leader of a group that has none."""
        self._leaders[group] = key
        self._groups[key] = group

    def follow(self, leader: K, key: K, now: float) -> None:
        """Have a request follow a leader."""
        self._following[key] = _Following(leader, now + FOLLOW_S)

    def release(self, leader: K) -> list[K]:
        """It leads no more, as it has a token or is gone; returns those that have followed it, in order."""
        group = self._groups.pop(leader, None)
        if group is None:
            return []
        del self._leaders[group]
        released = [key for key, following in self._following.items() if following.leader == leader]
        for key in released:
            del self._following[key]
        return released

    def remove(self, key: K) -> None:
        """It follows no more; without effect on what does not."""
        self._following.pop(key, None)

    def pop_late(self, now: float) -> list[tuple[K, K]]:
        """Those that have waited for long enough, each with its leader; they follow no more."""
        late = []
        for key, following in self._following.items():
            if following.until > now:
                break
            late.append((key, following.leader))
        for key, _ in late:
            del self._following[key]
        return late
