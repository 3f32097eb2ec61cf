"""Decides what a worker pulls next from its model's queue, and what a client with a full share of it holds back.

Each pull asks for one message, unless the queue is in the worker's own account. A server that transfers the answers of
a pull between accounts ends them at the first empty message (nats-server#6172). An empty request would hide the
requests behind it, and these would count as poison.
"""

import enum
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Final, NamedTuple

from ....schemas.request import Lane

TURNS: Final[tuple[Lane, ...]] = ("resume", "resume", "high", "resume", "normal", "resume", "low", "resume")
"""The lanes of eight successive messages: resumes hold up results that have begun, and no lane starves another."""
STRICT: Final[tuple[Lane, ...]] = ("high", "normal", "low", "resume")
"""The order in which lanes take the turns of an empty lane. `resume` is last, because it has most turns."""
STANDING_S: Final = 1.0
"""Seconds for which the server keeps a standing pull: the limit for which the pull of a dead worker claims a message.
"""
MAX_OVER: Final = 3
"""With room for one request, a message may arrive on each of the four lanes, and the worker does not know on which."""
MAX_BATCH: Final = 256
"""Pulls of all probes: the round trip between two probes is small compared with this number."""
PULLED_BYTES: Final = 32 * 1024 * 1024
"""The maximum bytes of all probes: the server closes a connection with 64 MB of pending data."""
SMALL_BYTES: Final = PULLED_BYTES // MAX_BATCH
"""The largest request, with its subjects, that a probe of `MAX_BATCH` pulls may deliver, in bytes."""
FEW_S: Final = 1.0
"""Seconds for which pulls are limited in number after a larger request: all may have the largest size."""
LOST_S: Final = 1.0
"""Seconds after which a pull without its due answer counts as lost."""
RETRY_S: Final = 0.25
"""Seconds until a lane is pulled again after a rejected pull: a server shuts down, or a cluster elects a leader."""


class PullStatus(enum.Enum):
    """The server's reason for the end of a pull."""

    COMPLETE = enum.auto()
    """The message arrived, and was smaller than the limit."""
    EMPTY = enum.auto()
    """The lane has no more messages."""
    MISSING = enum.auto()
    """The consumer does not exist."""
    TOO_LARGE = enum.auto()
    """The next message is larger than the pull allows."""
    REFUSED = enum.auto()
    """The server rejected the pull. It may succeed later."""


def decode_status(code: str, description: str) -> PullStatus:
    """Decode the status headers of a message without content."""
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
    """Pulls of one message each, to publish together."""

    lane: Lane
    number: int
    """The number of these pulls, never used twice. Their answers have it."""
    num_pulls: int
    """The number of pulls to publish, all with this `number`."""
    max_bytes: int | None
    """The maximum size of the message of each pull; None: no limit."""
    is_standing: bool
    """True if the server waits `STANDING_S` for a message. False: it answers immediately."""


@dataclass(slots=True)
class _LaneState:
    """The last pull on one lane, and its answer."""

    number: int = -1
    left: int = 0
    """Messages that the pull may still deliver; 0: no pull is open."""
    is_standing: bool = False
    ends_at: float = 0.0
    """The time at which the pull counts as lost. Valid only while it is open."""
    waiting: int = 0
    """Messages that the lane had behind the last delivered message; 0: none, or not known."""
    is_empty: bool = False
    """True if the lane had no more messages just now. Cleared if no standing pull follows immediately."""
    was_found_empty: bool = False
    """True if the last answer was no message. Otherwise the lane may have a standing pull only if the lanes before it
    are empty, because each message of a lane takes a turn."""
    seen_empty_at: float = -math.inf
    """The last time when an answer reported no messages in the lane, or a pull was standing on it."""
    not_before: float = 0.0
    few_until: float = 0.0
    """Until this time, no probe limits the size of messages."""

    def limit(self, now: float, few: int) -> int:
        """Return the number of messages to ask for at once; 0: the lane takes no turns now.

        It is the number that waited, and twice that number up to `few`: at the start of a burst, more messages have
        arrived since. A pull that finds nothing costs the server as much as a pull that delivers a message.
        """
        if self.left:
            return 0 if self.is_standing else self.left
        return 0 if self.not_before > now else max(1, self.waiting, min(2 * self.waiting, few))


_WAITING: Final = attrgetter("waiting")
_SEEN_EMPTY_AT: Final = attrgetter("seen_empty_at")


class PullPlan:
    """The pulls of one worker.

    Invariants: the open pulls may deliver at most `MAX_OVER` messages more than there is room for. Each message takes a
    turn of `TURNS`. The lane of the turn delivers it, or, if that lane is known to be empty, the first of `STRICT` that
    is not. So a lane with messages gets at least its turns, whatever the other lanes have.

    A *probe* delivers the messages that a lane has now, and its answer says if there are more. After an empty answer, a
    *standing* pull waits for the next message of the lane, outside the turns. The queue is known to be empty only if
    every lane has a standing pull.

    Args:
        lanes: the lanes of the queue.
        max_payload: bytes of the largest message.
    """

    def __init__(self, lanes: Sequence[Lane], max_payload: int) -> None:
        self._few = max(1, min(MAX_BATCH, PULLED_BYTES // max(1, max_payload)))
        self.is_batched = False
        """True if all pulls of one number are published as one pull, which has one end."""
        self._lanes = {lane: _LaneState() for lane in lanes}
        self._next_number = 0
        self._num_messages = 0

    def next_pulls(self, room: int, now: float) -> list[Pull]:
        """Return the pulls to publish now, and count them as open. Call it after every event and at `next_at`.

        Args:
            room: the number of further requests that may be accepted. Open pulls do not count.
        """
        free = room + MAX_OVER
        for state in self._lanes.values():
            if state.left and state.ends_at <= now:
                state.left = 0
            free -= state.left
        pulls: list[Pull] = []
        if room > 0 and free > 0:
            pulls = self._make_standing_pulls(free, now)
            free -= len(pulls)
            shares = self._count_shares(room, now)
            max_bytes = SMALL_BYTES if sum(shares.values()) > self._few else None
            for lane, share in shares.items():
                count = min(share, free)
                if count > 0 and not self._lanes[lane].left:
                    pulls.append(self._pull(lane, count, now, max_bytes=max_bytes))
                    free -= count
        for state in self._lanes.values():
            state.is_empty = False
            if state.left and state.is_standing:
                state.seen_empty_at = now
        return pulls

    def _make_standing_pulls(self, free: int, now: float) -> list[Pull]:
        pulls: list[Pull] = []
        are_empty = True
        for lane, state in self._lanes.items():
            may_stand = state.is_empty and not state.left and (are_empty or state.was_found_empty)
            if may_stand and state.not_before <= now and len(pulls) < free:
                pulls.append(self._pull(lane, 1, now, is_standing=True))
            are_empty = are_empty and bool(state.left) and state.is_standing
        return pulls

    def _count_shares(self, room: int, now: float) -> dict[Lane, int]:
        """Return the number of the next `room` messages that each lane delivers, with those of its open probe."""
        limits, shares, most = {}, {}, min(room, MAX_BATCH)
        for lane, state in self._lanes.items():
            limits[lane], shares[lane] = state.limit(now, self._few), 0
            if now < state.few_until:
                most = min(most, self._few)
        for turn in range(self._num_messages, self._num_messages + most):
            lane = TURNS[turn % len(TURNS)]
            if not limits[lane]:
                lane = next(filter(limits.get, STRICT), lane)
            if shares[lane] >= limits[lane]:
                break  # the answers decide which lane has the next turn
            shares[lane] += 1
        return shares

    def lanes_waiting(self, now: float) -> tuple[Lane, ...] | None:
        """Return the lanes that had more requests at their last pull; None: not known.

        After each lane was seen empty, the queue counts as empty for as long as a pull can stand, also if the worker
        has had no room since.
        """
        # This is asked for each request.
        states = self._lanes.values()
        waiting = tuple(compress(self._lanes, map(_WAITING, states)))
        return waiting or (() if min(map(_SEEN_EMPTY_AT, states)) >= now - STANDING_S else None)

    def _pull(
        self, lane: Lane, count: int, now: float, *, max_bytes: int | None = None, is_standing: bool = False
    ) -> Pull:
        state = self._lanes[lane]
        state.number, state.left, state.is_standing = self._next_number, count, is_standing
        self._next_number += 1
        state.ends_at = now + LOST_S + (STANDING_S if is_standing else 0.0)
        return Pull(lane, state.number, count, max_bytes, is_standing)

    def count_message(self, lane: Lane, *, waiting: int) -> None:
        """Record a message.

        Args:
            waiting: further messages that the lane had when this one was sent; an estimate for redelivered messages.
        """
        state = self._lanes[lane]
        self._num_messages += 1
        state.waiting, state.was_found_empty = waiting, False
        if state.left:
            state.left -= 1
            state.is_empty = not state.left and not waiting

    def end_pull(self, number: int, answer: PullStatus, now: float) -> None:
        """Record that one pull ended without a message. The end of a pull that counted as lost has no effect."""
        for state in self._lanes.values():
            if state.number == number and state.left and answer is not PullStatus.COMPLETE:
                state.left = 0 if self.is_batched else state.left - 1
                if answer is PullStatus.TOO_LARGE:
                    state.few_until = now + FEW_S
                    continue
                state.waiting = 0
                state.not_before = now + RETRY_S if answer is PullStatus.REFUSED else 0.0
                state.was_found_empty = answer is PullStatus.EMPTY
                state.is_empty = state.was_found_empty and not state.left
                if answer is PullStatus.EMPTY:
                    state.seen_empty_at = now

    def reset(self) -> None:
        """Record that no pull is open any more: the connection was lost, or the inbox was closed."""
        for state in self._lanes.values():
            state.left = state.waiting = 0
            state.is_empty, state.seen_empty_at = False, -math.inf
            state.not_before = state.few_until = 0.0

    def next_at(self, now: float) -> float | None:
        """Return the time at which `next_pulls` may return more without an event; None: never."""
        times = [state.ends_at for state in self._lanes.values() if state.left]
        times += [state.not_before for state in self._lanes.values() if state.not_before > now]
        return min(times, default=None)


class HeldBack:
    """The numbers of one client's held-back publishes, by subject. Plain state, no I/O.

    The queue limits the requests of each client in each lane and rejects further ones. The client holds rejected
    requests back in the order in which they were published. It publishes one for each request that leaves the queue: a
    worker has accepted a request, or the queue has stored a request that was held back. An occasional probe finds other
    new room.

    Invariant: requests of one lane that are held back leave in the order of their numbers. Each leaves once, unless the
    queue rejects it again.
    """

    def __init__(self) -> None:
        # Heaps. A discarded number stays there until its turn.
        self._numbers: dict[str, list[int]] = {}
        self._kept: set[int] = set()
        # By subject: the number of requests that may be published.
        self._room: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of requests that are held back."""
        return len(self._kept)

    @property
    def is_idle(self) -> bool:
        """True if no new request must wait behind others."""
        return not self._numbers

    def holds(self, subject: str) -> bool:
        """Return True if requests for the subject are held back, so that a new one must wait behind them."""
        return subject in self._numbers

    def add(self, subject: str, number: int) -> None:
        """Hold back a request that the queue rejected, or that comes after rejected requests."""
        heapq.heappush(self._numbers.setdefault(subject, []), number)
        self._kept.add(number)

    def discard(self, number: int) -> None:
        """Remove a request that must not be published any more; without effect if it is not here."""
        self._kept.discard(number)

    def add_room(self, subject: str) -> None:
        """Count one request of the client that has left the queue or was stored."""
        if subject in self._numbers:
            self._room[subject] = self._room.get(subject, 0) + 1

    def add_room_everywhere(self) -> None:
        """Let the client try one request of each subject."""
        for subject in self._numbers:
            self.add_room(subject)

    def pop_due(self) -> list[int]:
        """Return the numbers of the requests to publish now, and stop holding them back."""
        due: list[int] = []
        for subject, room in self._room.items():
            numbers = self._numbers[subject]
            end = len(due) + room
            while numbers and len(due) < end:
                number = heapq.heappop(numbers)
                if number in self._kept:
                    self._kept.remove(number)
                    due.append(number)
            if not numbers:
                del self._numbers[subject]
        self._room.clear()
        return due
