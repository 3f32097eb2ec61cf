"""Requests that a client holds back because its share of a lane is full.

The queue limits the requests of each client in each lane and rejects further ones. The client holds rejected requests
back in the order in which they were published. It publishes one for each request that leaves the queue: a worker has
accepted a request, or the queue has stored a request that was held back. An occasional probe finds other new room.

Invariant: requests of one lane that are held back leave in the order of their numbers. Each leaves once, unless the
queue rejects it again.
"""

import heapq

__all__ = ["HeldBack"]


class HeldBack:
    """The numbers of one client's held-back publishes, by subject. Plain state, no I/O."""

    def __init__(self) -> None:
        # Heaps. A discarded number stays there until its turn.
        self._numbers: dict[str, list[int]] = {}
        self._kept: set[int] = set()
        # By subject: the number of requests that may be published.
        self._room: dict[str, int] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<HeldBack subjects={len(self._numbers)} requests={len(self)}>"

    def __len__(self) -> int:
        """Return the number of requests that are held back."""
        return len(self._kept)

    def holds(self, subject: str) -> bool:
        """Return True if requests for the subject are held back, so that a new one must wait behind them."""
        return subject in self._numbers

    def add(self, subject: str, number: int) -> None:
        """Hold back a request that the queue rejected, or that comes after rejected requests."""
        heapq.heappush(self._numbers.setdefault(subject, []), number)
        self._kept.add(number)

    def discard(self, number: int) -> None:
        """Remove a request that must not be published any more; without effect if it is not here."""
        self._kept.discard(number)

    def add_room(self, subject: str) -> None:
        """Count one request of the client that has left the queue or was stored."""
        if subject in self._numbers:
            self._room[subject] = self._room.get(subject, 0) + 1

    def add_room_everywhere(self) -> None:
        """Let the client try one request of each subject."""
        for subject in self._numbers:
            self.add_room(subject)

    def pop_due(self) -> list[int]:
        """Return the numbers of the requests to publish now, and stop holding them back."""
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
