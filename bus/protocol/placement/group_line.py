"""Requests of groups that wait in the client for a worker with room. Time is passed in; nothing here waits.

In the queue the requests of a group would be spread over all workers, each of which computes their prompt. Here they
wait for the worker that has it. They wait no longer than others find room: where nobody does for some time, the queue
is better.
"""

import itertools
import math
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

__all__ = ["NO_ROOM_S", "GroupLine"]

NO_ROOM_S: Final = 2.0
"""How long the line waits while nobody in it finds room: about what a worker needs for a long prompt itself."""

K = TypeVar("K", bound=Hashable)


class GroupLine(Generic[K]):
    """The requests of one client and model that wait, by group. Bounded by its requests in flight."""

    def __init__(self) -> None:
        # Groups in order of arrival, and in each its requests, with when they came.
        self._groups: dict[int, dict[K, float]] = {}
        self._group_of: dict[K, int] = {}
        self._had_room_at = -math.inf

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<GroupLine groups={len(self._groups)} waiting={len(self)}>"

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._group_of)

    def __contains__(self, key: K) -> bool:
        """It waits."""
        return key in self._group_of

    def add(self, group: int, key: K, now: float) -> None:
        """Have a request wait that does not."""
        self._groups.setdefault(group, {})[key] = now
        self._group_of[key] = group

    def remove(self, key: K) -> None:
        """It waits no longer; without effect on what does not wait."""
        group = self._group_of.pop(key, None)
        if group is not None:
            del self._groups[group][key]
            if not self._groups[group]:
                del self._groups[group]

    def note_room(self, now: float) -> None:
        """A request that waited has found room: the others wait on."""
        self._had_room_at = now

    def first(self, count: int) -> list[tuple[int, list[K]]]:
        """Return the first `count` groups, each with its requests."""
        return [(group, list(keys)) for group, keys in itertools.islice(self._groups.items(), count)]

    def pop_late(self, now: float) -> list[K]:
        """Return those that have waited for long enough, in order, the requests of a group side by side."""
        since = now - NO_ROOM_S
        if self._had_room_at > since:
            return []
        late = [key for keys in self._groups.values() for key, came in keys.items() if came <= since]
        for key in late:
            self.remove(key)
        return late
