"""What a worker pulls next from its model's queue: which lanes, and how many messages of each.

Invariants: the pulls under way may bring at most `MAX_OVER` messages more than there is room for; a lane is pulled
from only while every lane before it is known to be empty; a lane is asked as soon as all before it are.

A *probe* takes what a lane has now, and its answer says whether that was all. On a lane that was just found empty a
*standing* pull waits for the next message. Only when every lane stands is the queue known to be empty.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from schemas.request import Lane

__all__ = ["MAX_OVER", "STANDING_S", "Answer", "Pull", "PullPlan", "read_status"]

STANDING_S: Final = 1.0
"""How long the server keeps a standing pull: what dies with its worker claims no message for longer."""
MAX_OVER: Final = 3
"""With room for one request a message may come on each of the four lanes, and nobody knows on which."""
MAX_BATCH: Final = 256
"""Messages of one probe: the round trip between two of them weighs nothing against that many."""
LOST_S: Final = 1.0
"""After this long without the answer that was due, a pull or its answer was lost."""
RETRY_S: Final = 0.25
"""Before a lane is asked again whose pull was refused: as a server shuts down, or a cluster elects a leader."""


class Answer(enum.Enum):
    """How the server says that a pull has ended."""

    EMPTY = enum.auto()
    """The lane has no more messages."""
    MORE = enum.auto()
    """It brought as many bytes, or messages, as it asked for; there may be more."""
    MISSING = enum.auto()
    """There is no such consumer, or no longer."""
    REFUSED = enum.auto()
    """It may succeed later."""


def read_status(code: str, description: str) -> Answer:
    """Read the status headers of a message without content."""
    if code in {"404", "408"}:
        return Answer.EMPTY
    if code == "503" or "Deleted" in description:
        return Answer.MISSING
    if "MaxBytes" in description or "Completed" in description:
        return Answer.MORE
    return Answer.REFUSED


class Pull(NamedTuple):
    """One pull to publish."""

    lane: Lane
    number: int
    """Never used twice; the answer bears it."""
    batch: int
    """Messages at most."""
    is_standing: bool
    """Wait `STANDING_S` for them; False: answer at once."""


@dataclass(slots=True)
class _LaneState:
    """The last pull on one lane, and what it told."""

    number: int = -1
    batch: int = 0
    left: int = 0
    """Messages that it may still bring; 0: none is under way."""
    is_standing: bool = False
    ends_at: float = 0.0
    """When it counts as lost; only while one is under way."""
    is_empty: bool = False
    """The lane had no more messages just now. Forgotten where no standing pull follows at once."""
    not_before: float = 0.0


class PullPlan:
    """The pulls of one worker.

    Args:
        lanes: in the order in which they are emptied.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = {lane: _LaneState() for lane in lanes}
        self._next_number = 0

    def __repr__(self) -> str:
        """One line: what is under way."""
        pulls = " ".join(f"{lane}={state.left}" for lane, state in self._lanes.items())
        return f"<PullPlan {pulls}>"

    @property
    def claimed(self) -> int:
        """Messages that the pulls under way may still bring."""
        return sum(state.left for state in self._lanes.values())

    def next_pulls(self, room: int, now: float) -> list[Pull]:
        """Say what to pull now, and take it as pulled. Call it after every event and at `next_at`.

        Args:
            room: requests that may be taken besides those already taken; what is under way does not count.
        """
        for state in self._lanes.values():
            if state.left and state.ends_at <= now:
                state.left = 0
        pulls = []
        if room > 0:
            for lane, state in self._lanes.items():
                if state.left:
                    if state.is_standing:
                        continue
                    break  # the answer decides whether it is the next lane's turn
                free = room + MAX_OVER - self.claimed
                if free <= 0:
                    break
                if state.not_before > now:
                    continue
                pulls.append(self._pull(lane, state, min(room, free, MAX_BATCH), now))
                if not state.is_standing:
                    break
        for state in self._lanes.values():
            state.is_empty = False
        return pulls

    def _pull(self, lane: Lane, state: _LaneState, batch: int, now: float) -> Pull:
        state.is_standing = state.is_empty
        state.number = self._next_number
        self._next_number += 1
        state.batch = state.left = 1 if state.is_standing else batch
        state.ends_at = now + LOST_S + (STANDING_S if state.is_standing else 0.0)
        return Pull(lane, state.number, state.left, state.is_standing)

    def deliver(self, lane: Lane, *, has_more: bool) -> None:
        """Take note of a message.

        Args:
            has_more: the lane had more messages when it was sent.
        """
        state = self._lanes[lane]
        if state.left:
            state.left -= 1
            state.is_empty = not state.left and not has_more

    def answer(self, number: int, answer: Answer, now: float) -> None:
        """Take note of the end of a pull; ends of earlier ones, which counted as lost, say nothing."""
        for state in self._lanes.values():
            if state.number == number and state.left:
                # A message that is larger than all a pull may bring would be asked for without end.
                is_refused = answer is Answer.REFUSED or (answer is Answer.MORE and state.left == state.batch)
                state.not_before = now + RETRY_S if is_refused else 0.0
                state.is_empty = answer is Answer.EMPTY
                state.left = 0

    def forget(self) -> None:
        """Nothing is under way any more: the connection was lost, or the inbox closed."""
        for state in self._lanes.values():
            state.left = 0
            state.is_empty = False
            state.not_before = 0.0

    def next_at(self, now: float) -> float | None:
        """When `next_pulls` may say more even if nothing happens until then; None: never."""
        times = [state.ends_at for state in self._lanes.values() if state.left]
        times += [state.not_before for state in self._lanes.values() if state.not_before > now]
        return min(times, default=None)
