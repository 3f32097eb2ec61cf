"""How many slots before others in the queue a client may have by the followers of its requests there.

A message of the queue brings its client a slot, and one more for each follower of its request: 32 at most. So a client
with its full share of the queue could have 32 times as many slots before the next client's request. Clients of this
library count followers against their share themselves; a worker does not rely on that. It knows how many messages
wait in a lane, and how many slots each of the last messages was worth: together, the slots of each client that stand in
the lane.

Invariant: no client gets a follower where its requests in the lane and their followers would be more than `MAX_AHEAD`.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from ....schemas.request import Lane

__all__ = ["MAX_AHEAD", "FollowerShares"]

MAX_AHEAD: Final = 2048
"""Slots of a client in a lane. Twice the queue's default share of a client, as the last messages are only a sample."""
MESSAGES_SEEN: Final = 64
"""Messages over which the slots of each client are a mean; older ones count less."""
MAX_CLIENTS: Final = 256
"""Clients that are told apart; of more, those that had no slot for longest count as new."""


@dataclass(slots=True)
class _ClientSlots:
    num_slots: float = 0.0
    """Slots of the client, each worth less with each message that came since."""
    at: int = 0
    """The message at which they were worth that."""

    def now(self, num_messages: int) -> float:
        """Return what the slots are worth after so many messages."""
        return self.num_slots * (1 - 1 / MESSAGES_SEEN) ** (num_messages - self.at)


class FollowerShares:
    """What one worker knows of the slots that clients have by the queue."""

    def __init__(self) -> None:
        self._num_messages = 0
        self._num_waiting: dict[Lane, int] = {}
        # In the order in which they had a slot last.
        self._clients: OrderedDict[str, _ClientSlots] = OrderedDict()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<FollowerShares clients={len(self._clients)} waiting={self._num_waiting}>"

    def count_message(self, client: str, lane: Lane, num_waiting: int) -> None:
        """Count a message of the queue, behind which so many others wait in its lane."""
        self._num_messages += 1
        self._num_waiting[lane] = num_waiting
        self._add_slot(client)

    def count_follower(self, client: str) -> None:
        """Count a slot that a client has by one of its messages."""
        self._add_slot(client)

    def may_follow(self, client: str, lane: Lane) -> bool:
        """Return True if a client with requests in a lane may have another follower there."""
        slots = self._clients.get(client)
        if slots is None:
            return True
        each = slots.now(self._num_messages) / MESSAGES_SEEN
        return self._num_waiting.get(lane, 0) * each <= MAX_AHEAD

    def _add_slot(self, client: str) -> None:
        slots = self._clients.pop(client, _ClientSlots())
        self._clients[client] = _ClientSlots(slots.now(self._num_messages) + 1, self._num_messages)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
