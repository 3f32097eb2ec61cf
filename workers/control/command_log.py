"""Which commands a worker has heard, and what it said last of each. Plain state, no I/O.

Invariants: of each command there is at most one final word; a command that comes again gets the last word again.
"""

from collections import OrderedDict
from dataclasses import dataclass

from schemas.control import Ack, AnyCommand
from schemas.limits import MAX_SEEN_COMMANDS

__all__ = ["CommandLog", "Heard"]


@dataclass(slots=True, eq=False)
class Heard:
    """One command."""

    command: AnyCommand
    controller: str
    """Who asked last: it gets the answers."""
    heard_at: float
    """On the clock that `CommandLog.begin` was given."""
    epoch: int | None
    """In which it is recorded, as far as is known; None for events too."""
    needs_read: int = 0
    """The look at the desired state that can tell what became of it, see `DesiredReader.look`."""
    last: Ack | None = None
    """What was said last."""


class CommandLog:
    """Commands under way, and those that were answered for good.

    Neither are more than `MAX_SEEN_COMMANDS`; of the latter the oldest are forgotten.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, Heard] = {}
        self._ended: OrderedDict[str, Heard] = OrderedDict()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<CommandLog under_way={len(self._under_way)} ended={len(self._ended)}>"

    @property
    def under_way(self) -> list[Heard]:
        """Commands without a final word, in the order in which they came."""
        return list(self._under_way.values())

    def find(self, command_id: str) -> Heard | None:
        """The command of this id; None where it is new, or was forgotten."""
        return self._under_way.get(command_id) or self._ended.get(command_id)

    def begin(self, command: AnyCommand, controller: str, now: float) -> Heard | None:
        """Take note of a new command; None where too many are under way."""
        if len(self._under_way) >= MAX_SEEN_COMMANDS:
            return None
        heard = self._under_way[command.id] = Heard(command, controller, now, command.epoch)
        return heard

    def is_under_way(self, heard: Heard) -> bool:
        """It waits for its final word."""
        return self._under_way.get(heard.command.id) is heard

    def note(self, heard: Heard, ack: Ack) -> bool:
        """Take note of a word; False: it must not be said, as the final one was, or the command was dropped."""
        if not self.is_under_way(heard):
            return False
        heard.last = ack
        if ack.status.is_final:
            del self._under_way[heard.command.id]
            self._ended[heard.command.id] = heard
            while len(self._ended) > MAX_SEEN_COMMANDS:
                self._ended.popitem(last=False)
        return True

    def drop(self) -> None:
        """Forget what is under way: another life of this worker must not answer for it."""
        self._under_way.clear()
