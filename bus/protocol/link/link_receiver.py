"""The client's half of a link: frames of one life of a worker, each once and in order, from one link at a time.

Invariant: a frame is taken only when all before it were; what was missing is asked for again until it is there. Credit
and acknowledgements count what was taken and never fall, as long as the link is the same.

A frame that does not decode counts as if it had never come, so that it is missing and the worker is asked for it again.
If two resends of the same frame do not decode either, the link is broken: the receiver follows only a later link of the
worker. Bytes without a readable header may be a stranger's. They break a link only together with a gap that stays
although the worker was asked to fill it.
"""

import enum
from collections.abc import Sequence

from msgspec.structs import replace

from ....schemas.frame_header import FrameHeader
from ....schemas.messages import WIRE_VERSION, Frame, LinkMessage, RequestKey

__all__ = ["MAX_UNACKED_FRAMES", "RESEND_INTERVAL_S", "UNREADABLE_GAP_S", "FrameVerdict", "LinkReceiver"]

MAX_UNACKED_FRAMES = 64
"""Frames after which an acknowledgement is due, however small they are: the worker keeps each until then."""
RESEND_INTERVAL_S = 0.25
"""Without progress a resend is asked for again after this: many round trips, and no time for a person."""
MAX_FAILED_RESENDS = 2
"""Resends of one frame that do not decode before the link is broken: damage on the way does not happen three times."""
UNREADABLE_GAP_S = 2.0
"""Seconds that a gap stands before bytes without a readable header break the link: a stranger's bytes may arrive before
the resent frame, but a resend takes less time."""


class FrameVerdict(enum.Enum):
    """What a frame is."""

    ACCEPTED = enum.auto()
    """The next one: its content is to be read now."""
    HEARTBEAT = enum.auto()
    """Without content; it may have told of frames that are missing."""
    DUPLICATE = enum.auto()
    """Taken before."""
    GAP = enum.auto()
    """Frames before it are missing: it will be sent again with them."""
    STALE = enum.auto()
    """Of a link, or a life of either side, that is over."""
    UNREADABLE = enum.auto()
    """Does not decode: it counts as if it had never come."""
    SKIPPED = enum.auto()
    """The next one. It does not decode and names one request, which it ends; the link goes on behind it."""
    BROKEN = enum.auto()
    """Does not decode, as the resends before it: the link is over, with all that it carried."""


class LinkReceiver:
    """Follows the links of one incarnation of a worker.

    Args:
        client_incarnation: this client's; frames for another are stale.

    Attributes:
        incarnation: of the worker, as of its first frame; None before that. Frames of another are stale.
        link: of that incarnation.
    """

    def __init__(self, client_incarnation: str) -> None:
        self._client_incarnation = client_incarnation
        self.incarnation: str | None = None
        self.link: int | None = None
        self._next = 0
        self._announced = 0
        self._asked_at: float | None = None
        self._wants_resend = False
        self._offset = 0
        self._credit = 0
        self._unacked_frames = 0
        self._unacked_bytes = 0
        # Of the next frame: since when it was asked for, whether the last resend failed to decode, and how many did.
        self._missing_since: float | None = None
        self._is_answered = False
        self._num_failed = 0
        self.is_broken = False
        """The link is over, and its worker has yet to open the next."""

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

    def is_new_link(self, frame: Frame | FrameHeader) -> bool:
        """The frame opens a later link than the one followed: what that had is lost."""
        return self.link is not None and not self._is_stale(frame) and frame.link > self.link

    def _is_stale(self, frame: Frame | FrameHeader) -> bool:
        if frame.client_incarnation != self._client_incarnation:
            return True
        if self.link is None:
            return False
        return (
            frame.incarnation != self.incarnation
            or frame.link < self.link
            or (self.is_broken and frame.link == self.link)
        )

    def receive(self, frame: Frame, num_bytes: int, now: float) -> FrameVerdict:
        """Take note of a frame of `num_bytes`; a new link is followed from here on."""
        if self._is_stale(frame):
            return FrameVerdict.STALE
        if frame.link != self.link:
            self._start_link(frame)
        if frame.is_heartbeat:
            # It knows how far the link is, also where a frame before it claimed more.
            self._announced = frame.number
            self._check_gap(now)
            return FrameVerdict.HEARTBEAT
        if frame.number < self._next:
            return FrameVerdict.DUPLICATE
        if frame.number > self._next:
            self._announced = max(self._announced, frame.number + 1)
            self._check_gap(now)
            return FrameVerdict.GAP
        self._advance(num_bytes, now)
        return FrameVerdict.ACCEPTED

    def receive_unreadable(self, header: FrameHeader | None, num_bytes: int, now: float) -> FrameVerdict:
        """Take note of `num_bytes` that came on the subject of this link and do not decode.

        Args:
            header: what can be read of them; None: nothing.
        """
        if header is None:
            if self._missing_since is None:
                return FrameVerdict.UNREADABLE
            self._count_failed_resend()
            return self._break_after(now - self._missing_since >= UNREADABLE_GAP_S)
        if self._is_stale(header):
            return FrameVerdict.STALE
        if header.link != self.link:
            self._start_link(header)
        if header.number < self._next:
            return FrameVerdict.DUPLICATE
        self._announced = max(self._announced, header.number + 1)
        if header.number > self._next:
            self._check_gap(now)
            return FrameVerdict.GAP
        if len(header.keys) == 1:
            self._advance(num_bytes, now)
            return FrameVerdict.SKIPPED
        self._count_failed_resend()
        # The worker has sent it: no other resend of it is on its way.
        self._asked_at = None
        self._check_gap(now)
        return self._break_after(True)

    def _count_failed_resend(self) -> None:
        """Count the last resend that was asked for as failed, once."""
        if self._missing_since is not None and not self._is_answered:
            self._is_answered = True
            self._num_failed += 1

    def _break_after(self, is_proven: bool) -> FrameVerdict:
        if not is_proven or self._num_failed < MAX_FAILED_RESENDS:
            return FrameVerdict.UNREADABLE
        self.is_broken = True
        self._wants_resend = False
        self._unacked_frames = self._unacked_bytes = 0
        return FrameVerdict.BROKEN

    def _advance(self, num_bytes: int, now: float) -> None:
        """The next frame is there."""
        self._next += 1
        self._offset += num_bytes
        self._unacked_frames += 1
        self._unacked_bytes += num_bytes
        # What is missing is on its way: asking again would only double it.
        self._asked_at = now if self._has_gap else None
        self._reset_resends()

    def _reset_resends(self) -> None:
        self._missing_since, self._is_answered, self._num_failed = None, False, 0

    def _start_link(self, frame: Frame | FrameHeader) -> None:
        self.incarnation, self.link = frame.incarnation, frame.link
        self._next = self._announced = self._offset = self._credit = 0
        self._unacked_frames = self._unacked_bytes = 0
        self._asked_at, self._wants_resend = None, False
        self._reset_resends()
        self.is_broken = False

    def _check_gap(self, now: float) -> None:
        if not self._has_gap:
            self._asked_at = None
            self._reset_resends()
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
        self._check_gap(now)
        resend, self._wants_resend = self._wants_resend, False
        if resend:
            self._asked_at = now
            self._is_answered = False
            if self._missing_since is None:
                self._missing_since = now
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

    def break_messages(self, abort: Sequence[RequestKey] = ()) -> tuple[LinkMessage, LinkMessage]:
        """Return what to tell the worker of a broken link, in this order: it then drops the link and opens the next.

        The second message asks for a frame that the first one acknowledges. A worker takes that for a client which has
        lost its place. If the first frame of all is the one that does not decode, it is acknowledged for that purpose.
        """
        acked = max(self._next, 1)
        first = LinkMessage(
            WIRE_VERSION,
            list(abort),
            client_incarnation=self._client_incarnation,
            incarnation=self.incarnation or "",
            link=self.link or 0,
            acked=acked,
        )
        return first, replace(first, abort=[], acked=acked - 1, resend=True)
