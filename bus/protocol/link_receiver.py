"""The client's half of a link: frames from one worker, each once and in order, from one link at a time.

Invariant: a frame is taken only when all before it were; what was missing is asked for again until it is there. Credit
and acknowledgements count what was taken and never fall, as long as the link is the same.
"""

import enum
from collections import deque
from collections.abc import Sequence

from schemas.messages import WIRE_VERSION, Frame, LinkMessage, RequestKey

__all__ = ["MAX_UNACKED_FRAMES", "RESEND_INTERVAL_S", "LinkReceiver", "Verdict"]

MAX_UNACKED_FRAMES = 64
"""Frames after which an acknowledgement is due, however small they are: the worker keeps each until then."""
RESEND_INTERVAL_S = 0.25
"""Without progress a resend is asked for again after this: many round trips, and no time for a person."""
MAX_RETIRED = 8
"""Incarnations that were given up and whose late frames are told from a new one's: a worker starts rarely."""


class Verdict(enum.Enum):
    """What a frame is."""

    TAKEN = enum.auto()
    """The next one: its content is to be read now."""
    HEARTBEAT = enum.auto()
    """Without content; it may have told of frames that are missing."""
    DUPLICATE = enum.auto()
    """Taken before."""
    GAP = enum.auto()
    """Frames before it are missing: it will be sent again with them."""
    STALE = enum.auto()
    """Of a link, or a life of either side, that is over."""


class LinkReceiver:
    """Follows the links of one worker.

    Args:
        client_incarnation: this client's; frames for another are stale.

    Attributes:
        incarnation: of the worker, as of its last frame; None before the first.
        link: of that incarnation.
    """

    def __init__(self, client_incarnation: str) -> None:
        self._client_incarnation = client_incarnation
        self.incarnation: str | None = None
        self.link: int | None = None
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)
        self._next = 0
        self._announced = 0
        self._asked_at: float | None = None
        self._wants_resend = False
        self._offset = 0
        self._credit = 0
        self._unacked_frames = 0
        self._unacked_bytes = 0

    def __repr__(self) -> str:
        """One line with counts."""
        gap = f" of {self._announced}" if self._has_gap else ""
        return f"<LinkReceiver {self.incarnation}/{self.link} next={self._next}{gap} offset={self._offset}>"

    @property
    def _has_gap(self) -> bool:
        return self._next < self._announced

    @property
    def has_unacked(self) -> bool:
        """Frames were taken that the worker does not know of."""
        return self._unacked_frames > 0

    def begins_anew(self, frame: Frame) -> bool:
        """The frame opens another incarnation or a later link than the one followed: what that had is lost."""
        if self.incarnation is None or self.link is None or self._is_stale(frame):
            return False
        return frame.incarnation != self.incarnation or frame.link > self.link

    def _is_stale(self, frame: Frame) -> bool:
        if frame.client_incarnation != self._client_incarnation or frame.incarnation in self._retired:
            return True
        return frame.incarnation == self.incarnation and self.link is not None and frame.link < self.link

    def receive(self, frame: Frame, num_bytes: int, now: float) -> Verdict:
        """Take note of a frame of `num_bytes`; a new link is followed from here on."""
        if self._is_stale(frame):
            return Verdict.STALE
        if (frame.incarnation, frame.link) != (self.incarnation, self.link):
            self._follow(frame)
        if frame.is_heartbeat:
            # It knows how far the link is, also where a frame before it claimed more.
            self._announced = frame.number
            self._look_for_gap(now)
            return Verdict.HEARTBEAT
        if frame.number < self._next:
            return Verdict.DUPLICATE
        if frame.number > self._next:
            self._announced = max(self._announced, frame.number + 1)
            self._look_for_gap(now)
            return Verdict.GAP
        self._next += 1
        self._offset += num_bytes
        self._unacked_frames += 1
        self._unacked_bytes += num_bytes
        # What is missing is on its way: asking again would only double it.
        self._asked_at = now if self._has_gap else None
        return Verdict.TAKEN

    def _follow(self, frame: Frame) -> None:
        if self.incarnation is not None and self.incarnation != frame.incarnation:
            self._retired.append(self.incarnation)
        self.incarnation, self.link = frame.incarnation, frame.link
        self._next = self._announced = self._offset = self._credit = 0
        self._unacked_frames = self._unacked_bytes = 0
        self._asked_at, self._wants_resend = None, False

    def _look_for_gap(self, now: float) -> None:
        if not self._has_gap:
            self._asked_at = None
        rested = self._asked_at is None or now - self._asked_at >= RESEND_INTERVAL_S
        self._wants_resend = self._has_gap and rested

    def is_ack_due(self, window: int) -> bool:
        """The worker should hear at once: much has arrived since it last did, or something is missing."""
        return (
            self._wants_resend
            or self._unacked_frames >= MAX_UNACKED_FRAMES
            or 4 * self._unacked_bytes >= max(window, 1)
        )

    def message(self, *, window: int, now: float, abort: Sequence[RequestKey] = ()) -> LinkMessage:
        """What to tell the worker now: what has arrived, what it may send, what is missing.

        Args:
            window: bytes that may be under way; credit that was granted before stands.
            abort: requests to stop.
        """
        self._look_for_gap(now)
        resend, self._wants_resend = self._wants_resend, False
        if resend:
            self._asked_at = now
        self._credit = max(self._credit, self._offset + window)
        self._unacked_frames = self._unacked_bytes = 0
        return LinkMessage(
            WIRE_VERSION,
            list(abort),
            client_incarnation=self._client_incarnation,
            incarnation=self.incarnation or "",
            link=self.link or 0,
            acked=self._next,
            credit=self._credit,
            resend=resend,
        )
