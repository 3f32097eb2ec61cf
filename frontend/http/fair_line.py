"""Which request for tokens is next: the users' requests share the room that the fleet has.

Nothing here waits; `turns.py` is the asyncio around it.
"""

import heapq
from dataclasses import dataclass

__all__ = ["FairLine", "Ticket"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place in the line.

    Args:
        size: how many samples it asks for.
        priority: within its user's requests; lower is more urgent.
    """

    user: str
    size: int = 1
    priority: int = 0
    serial: int = 0
    """In the order in which requests came."""
    is_due: bool = False
    """It has had its turn, and counts as under way."""
    has_ended: bool = False

    def __lt__(self, other: "Ticket") -> bool:
        """Return True if this one comes first among its user's requests."""
        return (self.priority, self.serial) < (other.priority, other.serial)


class FairLine:
    """The requests for one model: those that wait, by user, and how many samples of each user are under way.

    Next is the user with the fewest samples under way; among equals, the one whose last turn was longest ago.
    """

    def __init__(self) -> None:
        # Heaps, of which none is empty.
        self._waiting: dict[str, list[Ticket]] = {}
        # Of users with requests that wait or are under way; so are the others.
        self._under_way: dict[str, int] = {}
        self._last_turns: dict[str, int] = {}
        self._serial = 0

    def __bool__(self) -> bool:
        """Return True if a request waits or is under way."""
        return bool(self._under_way)

    def add(self, ticket: Ticket) -> None:
        """Have a request wait."""
        self._serial += 1
        ticket.serial = self._serial
        self._under_way.setdefault(ticket.user, 0)
        heapq.heappush(self._waiting.setdefault(ticket.user, []), ticket)

    def next(self, room: int) -> Ticket | None:
        """Return the request whose turn it is, which counts as under way from now on; None if it has to wait.

        Args:
            room: for samples under way. The last request may ask for more than is left.
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
        """Forget a request that waits or is under way; safe to repeat."""
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
