"""The commands that a worker has received, and the last ack of each. Plain state, no I/O.

Invariants: a command has at most one final ack. If a command is received again, its last ack is published again.
"""

import asyncio
import math
from collections import OrderedDict
from dataclasses import dataclass

from ...schemas.acks import Ack
from ...schemas.control import AnyCommand
from ...schemas.limits import MAX_SEEN_COMMANDS

__all__ = ["CommandLog", "ReceivedCommand"]


@dataclass(slots=True, eq=False)
class ReceivedCommand:
    """One command."""

    command: AnyCommand
    controller: str
    """The controller that sent the command last, and receives the acks."""
    received_at: float
    """Time of the first receipt, on the clock of `CommandLog.add`."""
    epoch: int | None
    """Epoch in which the command was recorded. None if it is unknown, or for a one-off command."""
    needs_read: int = 0
    """Number of the read that can show the outcome, as `DesiredReader.request_read` counts reads."""
    limit: asyncio.Timeout | None = None
    """Time limit of a one-off command in execution, or None before its execution."""
    last: Ack | None = None
    """The last published ack, or None."""
    progress_at: float = -math.inf
    """Monotonic time of the last progress ack."""

    @property
    def author(self) -> str:
        """The user of the HTTP service for whom the command is, or else its controller."""
        return self.command.by or self.controller


class CommandLog:
    """Open commands and recently ended commands: at most `MAX_SEEN_COMMANDS` of each."""

    def __init__(self) -> None:
        self._under_way: dict[str, ReceivedCommand] = {}
        self._ended: OrderedDict[str, ReceivedCommand] = OrderedDict()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<CommandLog under_way={len(self._under_way)} ended={len(self._ended)}>"

    @property
    def under_way(self) -> list[ReceivedCommand]:
        """Commands without a final ack, in the order of arrival."""
        return list(self._under_way.values())

    def find(self, command_id: str) -> ReceivedCommand | None:
        """Return the command with this id, or None if it is new or was removed."""
        return self._under_way.get(command_id) or self._ended.get(command_id)

    def add(self, command: AnyCommand, controller: str, now: float) -> ReceivedCommand | None:
        """Add a new command. Return None if too many commands are open."""
        if len(self._under_way) >= MAX_SEEN_COMMANDS:
            return None
        received = self._under_way[command.id] = ReceivedCommand(command, controller, now, command.epoch)
        return received

    def is_under_way(self, received: ReceivedCommand) -> bool:
        """Return True if the command has no final ack and was not removed."""
        return self._under_way.get(received.command.id) is received

    def add_ack(self, received: ReceivedCommand, ack: Ack) -> bool:
        """Add an ack. Return False if the command has its final ack or was removed: the ack must not be published."""
        if not self.is_under_way(received):
            return False
        received.last = ack
        if ack.status.is_final:
            del self._under_way[received.command.id]
            self._ended[received.command.id] = received
            while len(self._ended) > MAX_SEEN_COMMANDS:
                self._ended.popitem(last=False)
        return True

    def clear(self) -> None:
        """Remove the open commands, because another incarnation of this worker must not answer them."""
        self._under_way.clear()
