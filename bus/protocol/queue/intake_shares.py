"""Decides which placed requests a worker admits while other requests wait in the queue for its slots.

Invariants: while requests wait in the queue, the worker admits at most one more placed request than requests of the
queue, and none while more urgent requests wait. While the worker does not know if requests wait, placed requests get at
most half of its free slots, or the only slot. No client gets more than its share of placed requests while another
client asks for some. While the queue is known to be empty, the worker admits all placed requests.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ....schemas.request import Lane

__all__ = ["MAX_IN_TURN", "IntakeShares"]

MAX_IN_TURN: Final = 8
"""Placed requests that may follow each other after as many requests of the queue: a group of samples. A request of the
queue waits for at most this many more slots.
"""
ASKED_S: Final = 1.0
"""Seconds for which a client that placed a request has a share. It tries one worker once, and returns with its next
request.
"""
MAX_CLIENTS: Final = 256
"""Clients that are counted separately. Above this number, those that asked least recently count as new."""


@dataclass(slots=True)
class _ClientShare:
    given: int
    """Admitted placed requests of the client. A new client starts with the lowest number of the other clients."""
    asked_at: float


class IntakeShares:
    """The turns of placed and queued requests at one worker.

    Each `waiting` has the lanes in which requests wait, as far as the worker knows; empty: the queue is empty; None:
    not known. A worker whose slots all belong to placed requests pulls nothing, and would never know.
    """

    def __init__(self) -> None:
        self._num_turns = 1
        # Admitted since the worker last knew the state of the queue.
        self._num_unseen = 0
        # In the order in which they last asked.
        self._clients: OrderedDict[str, _ClientShare] = OrderedDict()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<IntakeShares turns={self._num_turns} clients={len(self._clients)}>"

    def count_queued(self, waiting: Collection[Lane] | None) -> None:
        """Count an admitted request of the queue. The next turn belongs to a placed request."""
        self._num_unseen = max(self._num_unseen - 1, 0)
        if waiting is None or waiting:
            self._num_turns = min(self._num_turns + 1, MAX_IN_TURN)
        else:
            self._restart()

    def num_turns(self, waiting: Collection[Lane] | None, num_free: int) -> int:
        """Return how many of `num_free` slots placed requests may get before the next turn of the queue."""
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

    def count_turn(self, client: str, waiting: Collection[Lane] | None, now: float) -> None:
        """Count a placed request that has waited and now gets one of the slots of `num_turns`."""
        if waiting is not None and not waiting:
            self._restart()
        else:
            self._take_turn(self._ask(client, now), waiting)

    def count_follower(self, client: str, waiting: Collection[Lane] | None, now: float) -> None:
        """Count a request that follows its group: placed requests of other clients go before those of its client."""
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
        """Return the share of a client, and remove the shares of clients that have not asked for a while."""
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
