"""Requests of groups that wait in the client for a worker with room. Time is passed in; nothing here waits.

In the queue the requests of a group would be spread over all workers, each of which computes their prompt. Here they
wait for the worker that has it. They wait on while others in the line find room, if the fleet is mostly this client's.
Else, and where none of them finds room, they go to the queue: there, other clients' requests do not pass them.
"""

import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar, get_args

from ....schemas.request import Lane

__all__ = ["NO_ROOM_S", "GroupLine"]

NO_ROOM_S: Final = 2.0
"""How long requests wait while none in the line finds room: about what a worker needs for a long prompt itself."""

K = TypeVar("K", bound=Hashable)


class GroupLine(Generic[K]):
    """The requests of one client and model that wait, by group. Bounded by its requests in flight."""

    def __init__(self) -> None:
        # By lane, groups in order of arrival, and in each its requests, with when they came.
        self._lanes: dict[Lane, dict[int, dict[K, float]]] = {lane: {} for lane in get_args(Lane)}
        self._place_of: dict[K, tuple[Lane, int]] = {}
        self._had_room_at = -math.inf

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<GroupLine groups={sum(map(len, self._lanes.values()))} waiting={len(self)}>"

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._place_of)

    def __contains__(self, key: K) -> bool:
        """It waits."""
        return key in self._place_of

    def add(self, lane: Lane, group: int, key: K, now: float) -> None:
        """Have a request wait that does not."""
        self._lanes[lane].setdefault(group, {})[key] = now
        self._place_of[key] = lane, group

    def remove(self, key: K) -> None:
        """It waits no longer; without effect on what does not wait."""
        place = self._place_of.pop(key, None)
        if place is not None:
            lane, group = place
            groups = self._lanes[lane]
            del groups[group][key]
            if not groups[group]:
                del groups[group]

    def note_room(self, now: float) -> None:
        """A request that waited has found room, and the others may wait on."""
        self._had_room_at = now

    def first(self, count: int) -> list[tuple[int, list[K]]]:
        """Return the first `count` groups, each with its requests: those of the queue's earlier lanes come first."""
        return [(group, list(keys)) for group, keys in itertools.islice(self._groups(), count)]

    def pop_late(self, now: float) -> list[K]:
        """Return those that have waited for long enough, in order, the requests of a group side by side."""
        since = now - NO_ROOM_S
        if self._had_room_at > since:
            return []
        late = [key for _, keys in self._groups() for key, came in keys.items() if came <= since]
        for key in late:
            self.remove(key)
        return late

    def _groups(self) -> Iterator[tuple[int, dict[K, float]]]:
        return itertools.chain.from_iterable(groups.items() for groups in self._lanes.values())
