"""Decides which requests get the free slots of a worker: requests of the queue, placed requests, or waiting followers.

`IntakeShares` has the turns of the queue and of placed requests. `FollowerBacklog` has the requests that wait behind
others of their group. This module combines both. The caller passes in the time; nothing here waits.
"""

from collections.abc import Collection, Hashable
from typing import Generic, Literal, NamedTuple, TypeVar

from ....schemas.request import Lane
from .follower_backlog import FollowerBacklog, Turn
from .intake_shares import IntakeShares

__all__ = ["SlotRequest", "SlotTurns"]

K = TypeVar("K", bound=Hashable)


class SlotRequest(NamedTuple):
    """The attributes of a placed request that matter for its turn."""

    client: str
    lane: Lane
    group: str | None = None
    """Its group, if it may wait behind others of this group."""


class SlotTurns(Generic[K]):
    """The turns of one worker. Each `waiting` has the lanes in which requests wait, as in `IntakeShares`."""

    def __init__(self) -> None:
        self.shares = IntakeShares()
        self.backlog: FollowerBacklog[K] = FollowerBacklog()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<SlotTurns {self.shares!r} {self.backlog!r}>"

    def admit_placed(
        self, request: SlotRequest, waiting: Collection[Lane] | None, *, num_free: int, capacity: int, now: float
    ) -> Turn | Literal["now"] | None:
        """Return when a placed request begins, and count it; None: it must go to the queue.

        Args:
            num_free: slots that it might get now.
            capacity: the number of further followers that may wait.
        """
        client, lane, group = request
        if group is not None:
            turn = self.backlog.admit(client, group, lane, waiting, now, capacity=capacity)
            if turn is not None:
                self.shares.count_follower(client, waiting, now)
                return turn
        if num_free <= 0 or not self.shares.admit_placed(client, lane, waiting, num_free=num_free, now=now):
            return None
        if group is not None and waiting is not None and not waiting:
            # While requests wait in the queue, followers of placed requests would let a client bypass the queue.
            self.backlog.add_placed(client, group, lane, now)
        return "now"

    def num_due(self, waiting: Collection[Lane] | None, num_free: int) -> int:
        """Return how many of `num_free` slots belong to followers: as many as repeated calls of `pop` would return."""
        return min(self.backlog.num_due(waiting, self.shares.num_turns(waiting, num_free)), num_free)

    def pop(self, waiting: Collection[Lane] | None, num_free: int, now: float) -> K | None:
        """Return the follower that gets one of `num_free` slots; None: none waits, or the slot belongs to the queue."""
        begun = self.backlog.pop(waiting, self.shares.num_turns(waiting, num_free), now)
        if begun is None:
            return None
        if begun.turn == "placed":
            self.shares.count_turn(begun.client, waiting, now)
        return begun.key
