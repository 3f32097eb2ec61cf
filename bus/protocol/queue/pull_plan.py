"""What a worker pulls next from its model's queue: which lanes, and how many messages of each.

Each pull asks for one message. A server that carries the answers of a pull from one account to another ends them at the
first empty message (nats-server#6172): an empty request would hide those behind it, and they would count as poison.

Invariants: the pulls under way may bring at most `MAX_OVER` messages more than there is room for; a lane is pulled
from only while every lane before it is known to be empty; a lane is asked as soon as all before it are.

A *probe* takes what a lane has now, and its answer says whether that was all. On a lane that was just found empty a
*standing* pull waits for the next message. Only when every lane stands is the queue known to be empty.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ....schemas.request import Lane

__all__ = ["MAX_OVER", "STANDING_S", "Pull", "PullPlan", "PullStatus", "decode_status"]

STANDING_S: Final = 1.0
"""How long the server keeps a standing pull: what dies with its worker claims no message for longer."""
MAX_OVER: Final = 3
"""With room for one request a message may come on each of the four lanes, and nobody knows on which."""
MAX_BATCH: Final = 256
"""Pulls of one probe: the round trip between two probes weighs nothing against that many."""
PULLED_BYTES: Final = 32 * 1024 * 1024
"""What one probe may bring: the server cuts off a connection for which 64 MB wait."""
SMALL_BYTES: Final = PULLED_BYTES // MAX_BATCH
"""Size of a request with its subjects up to which a probe of `MAX_BATCH` pulls may bring it."""
FEW_S: Final = 1.0
"""How long a lane with a larger request is asked for so few requests that all may be of the largest size."""
LOST_S: Final = 1.0
"""After this long without the answer that was due, a pull or its answer was lost."""
RETRY_S: Final = 0.25
"""Before a lane is asked again whose pull was refused: as a server shuts down, or a cluster elects a leader."""


class PullStatus(enum.Enum):
    """How the server says that a pull has ended."""

    COMPLETE = enum.auto()
    """Its message came, and was smaller than it might have been."""
    EMPTY = enum.auto()
    """The lane has no more messages."""
    MISSING = enum.auto()
    """There is no such consumer, or no longer."""
    TOO_LARGE = enum.auto()
    """The next message is larger than the pull allows."""
    REFUSED = enum.auto()
    """It may succeed later."""


def decode_status(code: str, description: str) -> PullStatus:
    """Read the status headers of a message without content."""
    if code in {"404", "408"}:
        return PullStatus.EMPTY
    if code == "503" or "Deleted" in description:
        return PullStatus.MISSING
    if "MaxBytes" in description:
        return PullStatus.TOO_LARGE
    if description == "Batch Completed":
        return PullStatus.COMPLETE
    return PullStatus.REFUSED


class Pull(NamedTuple):
    """Pulls of one message each to publish at once."""

    lane: Lane
    number: int
    """Never used twice; the answers bear it."""
    num_pulls: int
    """How many to publish: all under this number."""
    max_bytes: int | None
    """Of the message that each may bring; None: any."""
    is_standing: bool
    """Wait `STANDING_S` for them; False: answer at once."""


@dataclass(slots=True)
class _LaneState:
    """The last pull on one lane, and what it told."""

    number: int = -1
    left: int = 0
    """Messages that it may still bring; 0: none is under way."""
    is_standing: bool = False
    ends_at: float = 0.0
    """When it counts as lost; only while one is under way."""
    waiting: int = 0
    """Messages that the lane had besides the last one that came; 0: none, or the worker does not know."""
    is_empty: bool = False
    """The lane had no more messages just now. Forgotten where no standing pull follows at once."""
    seen_empty_at: float = -math.inf
    """When an answer said last that the lane has no messages, or a pull was found standing on it."""
    not_before: float = 0.0
    few_until: float = 0.0
    """Until then no probe limits the size of messages."""


class PullPlan:
    """The pulls of one worker.

    Args:
        lanes: in the order in which they are emptied.
        max_payload: bytes of the largest message.
    """

    def __init__(self, lanes: Sequence[Lane], max_payload: int) -> None:
        self._few = max(1, min(MAX_BATCH, PULLED_BYTES // max(1, max_payload)))
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
                # Twice what waited: in a burst more has come since. A pull that finds nothing costs the server as much
                # as one that brings a message.
                pulls.append(self._pull(lane, state, min(room, free, max(1, 2 * state.waiting)), now))
                if not state.is_standing:
                    break
        for state in self._lanes.values():
            state.is_empty = False
            if state.left and state.is_standing:
                state.seen_empty_at = now
        return pulls

    def lanes_waiting(self, now: float) -> tuple[Lane, ...] | None:
        """Return the lanes that had more requests when they were asked last; None: it is not known.

        It is known that none has any for as long after each was seen empty as a pull can stand, also where the worker
        has had no room since.
        """
        waiting = tuple(lane for lane, state in self._lanes.items() if state.waiting)
        oldest = min(state.seen_empty_at for state in self._lanes.values())
        return waiting if waiting or now - oldest <= STANDING_S else None

    def _pull(self, lane: Lane, state: _LaneState, count: int, now: float) -> Pull:
        state.is_standing = state.is_empty
        state.number = self._next_number
        self._next_number += 1
        if state.is_standing:
            count = 1
        count = min(count, MAX_BATCH if now >= state.few_until else self._few)
        state.left = count
        state.ends_at = now + LOST_S + (STANDING_S if state.is_standing else 0.0)
        return Pull(lane, state.number, count, SMALL_BYTES if count > self._few else None, state.is_standing)

    def count_message(self, lane: Lane, *, waiting: int) -> None:
        """Take note of a message.

        Args:
            waiting: messages that the lane had besides when it was sent; an estimate where they are handed out again.
        """
        state = self._lanes[lane]
        state.waiting = waiting
        if state.left:
            state.left -= 1
            state.is_empty = not state.left and not waiting

    def end_pull(self, number: int, answer: PullStatus, now: float) -> None:
        """Take note that one pull ended without a message; ends of pulls that counted as lost say nothing."""
        for state in self._lanes.values():
            if state.number == number and state.left and answer is not PullStatus.COMPLETE:
                state.left -= 1
                if answer is PullStatus.TOO_LARGE:
                    state.few_until = now + FEW_S
                    continue
                state.waiting = 0
                state.not_before = now + RETRY_S if answer is PullStatus.REFUSED else 0.0
                state.is_empty = not state.left and answer is PullStatus.EMPTY
                if answer is PullStatus.EMPTY:
                    state.seen_empty_at = now

    def reset(self) -> None:
        """Nothing is under way any more: the connection was lost, or the inbox closed."""
        for state in self._lanes.values():
            state.left = state.waiting = 0
            state.is_empty, state.seen_empty_at = False, -math.inf
            state.not_before = state.few_until = 0.0

    def next_at(self, now: float) -> float | None:
        """When `next_pulls` may say more even if nothing happens until then; None: never."""
        times = [state.ends_at for state in self._lanes.values() if state.left]
        times += [state.not_before for state in self._lanes.values() if state.not_before > now]
        return min(times, default=None)
