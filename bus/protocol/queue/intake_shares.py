"""Which requests that clients placed at a worker it admits, while others wait in the queue for its slots.

Invariants: while requests wait in the queue, the worker admits at most one more placed request than it has admitted of
the queue, and none while more urgent ones wait; while it does not know whether any wait, placed requests get at most
half of its free slots, or the only one. Of the placed ones no client gets more than its share while another one asks
for some. Where the queue is known to be empty, all placed requests are admitted.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ....schemas.request import Lane

__all__ = ["MAX_IN_TURN", "IntakeShares"]

MAX_IN_TURN: Final = 8
"""Placed requests that may follow each other when as many of the queue were admitted before: a group of samples. So
many slots a request of the queue waits longer at most."""
ASKED_S: Final = 1.0
"""For how long a client that placed a request has a share: it tries one worker once, and comes back with its next."""
MAX_CLIENTS: Final = 256
"""Clients that are told apart; of more, those that asked least recently count as new."""


@dataclass(slots=True)
class _ClientShare:
    given: int
    """Placed requests of the client that were admitted, or a number like that of the others when it came."""
    asked_at: float


class IntakeShares:
    """The turns of placed and queued requests at one worker.

    Every `waiting` is what the worker knows of its queue: lanes in which requests wait; none: the queue is empty;
    None: not known. A worker whose slots are all taken by placed requests pulls nothing, and would never know.
    """

    def __init__(self) -> None:
        self._num_turns = 1
        # Admitted since the worker has known the queue last.
        self._num_unseen = 0
        # In the order in which they asked last.
        self._clients: OrderedDict[str, _ClientShare] = OrderedDict()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<IntakeShares turns={self._num_turns} clients={len(self._clients)}>"

    def count_queued(self, waiting: Collection[Lane] | None) -> None:
        """Count a request of the queue that was admitted: it is the turn of a placed one again."""
        self._num_unseen = max(self._num_unseen - 1, 0)
        if waiting is None or waiting:
            self._num_turns = min(self._num_turns + 1, MAX_IN_TURN)
        else:
            self._restart()

    def num_turns(self, waiting: Collection[Lane] | None, num_free: int) -> int:
        """Return how many of `num_free` slots placed requests may have before the queue has its next turn."""
        if waiting is None:
            return max((num_free - self._num_unseen + 1) // 2, 0)
        return min(self._num_turns, num_free) if waiting else num_free

    def admit_placed(
        self, client: str, lane: Lane, waiting: Collection[Lane] | None, *, num_free: int, now: float
    ) -> bool:
        """Return True if a placed request gets one of `num_free` slots, at least one, and count it."""
        if waiting is not None and not waiting:
            self._restart()
            return True
        share = self._ask(client, now)
        known = waiting or ()
        if known:
            self._num_unseen = 0
        is_behind = "high" in known or (lane == "low" and "normal" in known)
        is_ahead = share.given > min(other.given for other in self._clients.values())
        if is_behind or is_ahead or not self.num_turns(waiting, num_free):
            return False
        self._take_turn(share, waiting)
        return True

    def take_turn(self, client: str, waiting: Collection[Lane] | None, now: float) -> None:
        """Count a placed request that has waited, and has now one of the slots that `num_turns` says."""
        if waiting is not None and not waiting:
            self._restart()
        else:
            self._take_turn(self._ask(client, now), waiting)

    def count_follower(self, client: str, waiting: Collection[Lane] | None, now: float) -> None:
        """Count a request that follows one of its group: other clients' placed requests come before its client's."""
        if waiting is None or waiting:
            self._ask(client, now).given += 1

    def _take_turn(self, share: _ClientShare, waiting: Collection[Lane] | None) -> None:
        self._num_unseen += waiting is None
        self._num_turns = max(self._num_turns - 1, 0)
        share.given += 1

    def _restart(self) -> None:
        self._num_turns, self._num_unseen = 1, 0
        self._clients.clear()

    def _ask(self, client: str, now: float) -> _ClientShare:
        """Return the share of a client, and remove those of clients that have not asked for a while."""
        share = self._clients.pop(client, None)
        while self._clients and next(iter(self._clients.values())).asked_at <= now - ASKED_S:
            self._clients.popitem(last=False)
        if share is None or share.asked_at <= now - ASKED_S:
            share = _ClientShare(min((other.given for other in self._clients.values()), default=0), now)
        share.asked_at = now
        self._clients[client] = share
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return share
