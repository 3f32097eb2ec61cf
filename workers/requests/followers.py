"""Followers: requests that follow another request of their group to its worker.

The worker offers a follower to its client at once. The follower then waits here until the engine has a free slot.
"""

import time
from collections.abc import Callable, Collection

from ...bus.protocol.queue.follower_backlog import STALLED_S, Turn
from ...bus.protocol.queue.slot_turns import SlotTurns
from ...schemas.errors import ErrorCode, RequestRejected
from ...schemas.request import GenerateRequest, Lane, lane_of
from .intake_stats import IntakeStats
from .links import WorkerLinks
from .worker_requests import Instructions

__all__ = ["WaitingFollowers"]


class WaitingFollowers:
    """The offered followers that are not in the engine yet.

    Args:
        execute: executes instructions and wakes the publisher.
    """

    def __init__(self, links: WorkerLinks, execute: Callable[[Instructions], None], stats: IntakeStats) -> None:
        self.turns: SlotTurns[str] = SlotTurns()
        self.backlog = self.turns.backlog
        self._links = links
        self._execute = execute
        # The followers of the backlog, by engine name.
        self._requests: dict[str, GenerateRequest] = {}
        self._stats = stats

    def __repr__(self) -> str:
        """One line with counts."""
        return repr(self.backlog)

    def __len__(self) -> int:
        """Number of waiting followers."""
        return len(self.backlog)

    def add(self, name: str, client: str, request: GenerateRequest, turn: Turn) -> None:
        """Add an offered follower by its engine name."""
        self._requests[name] = request
        self.backlog.add(name, client, lane_of(request.priority), turn, time.monotonic())

    def pop(self, lanes_waiting: Collection[Lane] | None, num_free: int) -> tuple[str, GenerateRequest] | None:
        """Return the follower that gets the next free slot, or None, as `SlotTurns.pop` does."""
        name = self.turns.pop(lanes_waiting, num_free, time.monotonic())
        return None if name is None else (name, self._requests.pop(name))

    def remove(self, names: Collection[str]) -> None:
        """Remove followers that have ended. Unknown names are ignored."""
        if names and self._requests:
            self.backlog.remove(names)
            for name in names:
                self._requests.pop(name, None)

    def clear(self) -> None:
        """Remove all followers, because this worker has lost its lease."""
        self.remove(self.backlog.pop_all())

    def refuse_all(self) -> None:
        """Reject all followers. Their clients put them into the queue."""
        self._refuse(self.backlog.pop_all(), "this worker accepts no requests now")

    def refuse_stalled(self) -> None:
        """Reject followers that waited for `STALLED_S` while no follower of their lane got a slot."""
        reason = f"no follower of this lane got a slot on this worker for {STALLED_S:g} s"
        self._refuse(self.backlog.pop_stalled(time.monotonic()), reason)

    def _refuse(self, names: list[str], reason: str) -> None:
        if names:
            self._stats.refused += len(names)
            self.remove(names)
            self._links.refuse(names, RequestRejected(code=ErrorCode.QUEUE_FULL, message=reason))
            self._execute(Instructions())
