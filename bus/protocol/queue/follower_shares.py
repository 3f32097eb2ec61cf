"""Limits the slots that a client may get ahead of others through the followers of its requests in the queue.

A message of the queue gives its client a slot, and one more for each follower of its request: 32 at most. So a client
with its full share of the queue could get 32 times as many slots before the next client's request. Clients of this
library count followers against their share themselves, but a worker does not rely on that. The worker knows how many
messages wait in a lane, and how many slots each of the last messages gave. The product estimates the slots of each
client in the lane.

Invariant: a client gets no follower if its requests in the lane and their followers would exceed `MAX_AHEAD`.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from ....schemas.request import Lane

__all__ = ["MAX_AHEAD", "FollowerShares"]

MAX_AHEAD: Final = 2048
"""Slots of a client in a lane. Twice the default queue share of a client, because the last messages are only a sample.
"""
MESSAGES_SEEN: Final = 64
"""Messages over which the slots of each client are a mean. Older messages count less."""
MAX_CLIENTS: Final = 256
"""Clients that are counted separately. Above this number, those without a slot for the longest time count as new."""


@dataclass(slots=True)
class _ClientSlots:
    num_slots: float = 0.0
    """Slots of the client. The value of each slot decreases with each later message."""
    at: int = 0
    """The number of the message at which the slots had that value."""

    def now(self, num_messages: int) -> float:
        """Return the value of the slots after so many messages."""
        return self.num_slots * (1 - 1 / MESSAGES_SEEN) ** (num_messages - self.at)


class FollowerShares:
    """The slots that clients have through the queue, as far as one worker knows."""

    def __init__(self) -> None:
        self._num_messages = 0
        self._num_waiting: dict[Lane, int] = {}
        # In the order of their last slot.
        self._clients: OrderedDict[str, _ClientSlots] = OrderedDict()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<FollowerShares clients={len(self._clients)} waiting={self._num_waiting}>"

    def count_message(self, client: str, lane: Lane, num_waiting: int) -> None:
        """Count a message of the queue, and the number of messages that wait behind it in its lane."""
        self._num_messages += 1
        self._num_waiting[lane] = num_waiting
        self._add_slot(client)

    def count_follower(self, client: str) -> None:
        """Count a slot that a client gets through one of its messages."""
        self._add_slot(client)

    def may_follow(self, client: str, lane: Lane) -> bool:
        """Return True if a client with requests in a lane may get another follower there."""
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
