"""Fair scheduling of token requests: users share the fleet's capacity equally.

This module has no asyncio. `turns.py` waits and wakes requests.
"""

import heapq
from dataclasses import dataclass

__all__ = ["FairLine", "Ticket"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One queued request.

    Args:
        user: the user that sent the request.
        size: number of samples.
        priority: compared with the same user's requests only. Lower is more urgent.
    """

    user: str
    size: int = 1
    priority: int = 0
    serial: int = 0
    """Position in the order of arrival."""
    is_due: bool = False
    """True if the request was scheduled. It then counts as open."""
    has_ended: bool = False

    def __lt__(self, other: "Ticket") -> bool:
        """Return True if this request comes before another request of the same user."""
        return (self.priority, self.serial) < (other.priority, other.serial)


class FairLine:
    """The requests for one model: the waiting requests by user, and the number of open samples of each user.

    The next request belongs to the user with the fewest open samples. Among equal users, it belongs to the user that
    was scheduled least recently.
    """

    def __init__(self) -> None:
        # Heaps. A user without waiting requests has no entry.
        self._waiting: dict[str, list[Ticket]] = {}
        # Entries exist for users with waiting or open requests. `_last_turns` has the same users.
        self._under_way: dict[str, int] = {}
        self._last_turns: dict[str, int] = {}
        self._serial = 0

    def __bool__(self) -> bool:
        """Return True if a request waits or is open."""
        return bool(self._under_way)

    def add(self, ticket: Ticket) -> None:
        """Add a request to the line."""
        self._serial += 1
        ticket.serial = self._serial
        self._under_way.setdefault(ticket.user, 0)
        heapq.heappush(self._waiting.setdefault(ticket.user, []), ticket)

    def next(self, room: int) -> Ticket | None:
        """Return the next request and count it as open; None if all waiting requests must still wait.

        Args:
            room: limit on open samples. The last request may exceed it.
        """
        if not self._waiting or sum(self._under_way.values()) >= room:
            return None
        user = min(self._waiting, key=lambda user: (self._under_way[user], self._last_turns.get(user, 0)))
        ticket = self._waiting[user][0]
        self._leave(ticket)
        self._serial += 1
        self._last_turns[user] = self._serial
        self._under_way[user] += ticket.size
        ticket.is_due = True
        return ticket

    def end(self, ticket: Ticket) -> None:
        """Remove a waiting or open request. Repeated calls are safe."""
        if ticket.has_ended:
            return
        ticket.has_ended = True
        if ticket.is_due:
            self._under_way[ticket.user] -= ticket.size
        else:
            self._leave(ticket)
        if not self._under_way[ticket.user] and ticket.user not in self._waiting:
            del self._under_way[ticket.user]
            self._last_turns.pop(ticket.user, None)

    def _leave(self, ticket: Ticket) -> None:
        line = self._waiting[ticket.user]
        if line[0] is ticket:
            heapq.heappop(line)
        else:
            line.remove(ticket)
            heapq.heapify(line)
        if not line:
            del self._waiting[ticket.user]
