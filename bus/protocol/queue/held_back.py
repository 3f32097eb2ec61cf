"""Requests that a client keeps back because its share of a lane is full.

The queue bounds the requests of each client in each lane and refuses the rest. The client keeps the refused requests
in the order in which they were published, and publishes one for each that leaves the queue: a worker has accepted one,
or the queue has stored one of those that were kept back. A probe now and then finds room that came otherwise.

Invariant: of one lane, requests that are kept back leave in the order of their numbers, and each once unless it is
refused again.
"""

import heapq

__all__ = ["HeldBack"]


class HeldBack:
    """The numbers of one client's publishes that are kept back, by subject. Plain state, no I/O."""

    def __init__(self) -> None:
        # Heaps; a number that was discarded stays there until it is its turn.
        self._numbers: dict[str, list[int]] = {}
        self._kept: set[int] = set()
        # By subject: how many may be published.
        self._room: dict[str, int] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<HeldBack subjects={len(self._numbers)} requests={len(self)}>"

    def __len__(self) -> int:
        """Return how many are kept back."""
        return len(self._kept)

    def holds(self, subject: str) -> bool:
        """Return True if requests for the subject are kept back, so that a new one must wait behind them."""
        return subject in self._numbers

    def add(self, subject: str, number: int) -> None:
        """Keep back a request: it was refused, or comes behind others that were."""
        heapq.heappush(self._numbers.setdefault(subject, []), number)
        self._kept.add(number)

    def discard(self, number: int) -> None:
        """Forget a request that is not to be published any more; it need not be here."""
        self._kept.discard(number)

    def add_room(self, subject: str) -> None:
        """Note that one request of the client has left the queue, or was stored."""
        if subject in self._numbers:
            self._room[subject] = self._room.get(subject, 0) + 1

    def add_room_everywhere(self) -> None:
        """Let one request of each subject be tried."""
        for subject in self._numbers:
            self.add_room(subject)

    def pop_due(self) -> list[int]:
        """Return the numbers that are to be published now, and keep them back no longer."""
        due: list[int] = []
        for subject, room in self._room.items():
            numbers = self._numbers[subject]
            end = len(due) + room
            while numbers and len(due) < end:
                number = heapq.heappop(numbers)
                if number in self._kept:
                    self._kept.remove(number)
                    due.append(number)
            if not numbers:
                del self._numbers[subject]
        self._room.clear()
        return due
