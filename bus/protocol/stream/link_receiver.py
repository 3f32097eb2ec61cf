"""The client's half of a link: receives the frames of one incarnation of a worker, each once and in order.

Invariant: a frame is accepted only after all frames before it. The client asks for missing frames until they arrive.
Credit and frame acks count accepted frames. On one link they never fall.

A frame that does not decode counts as missing, so the client asks the worker for it again. If two resends of this frame
do not decode either, the link is broken: the receiver follows only a later link of the worker. Bytes without a readable
header may come from another sender. They break a link only together with a gap that stays although the client asked the
worker to fill it.
"""

import enum
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ....schemas.decoding import WIRE_VERSION
from ....schemas.messages import Frame, FrameHeader, LinkMessage, RequestKey

MAX_UNACKED_FRAMES = 64
"""Frames after which a frame ack is due, regardless of their size: the worker keeps each frame until its ack."""
RESEND_INTERVAL_S = 0.25
"""Seconds without progress after which the client asks for a resend again: many round trips, but short for a person."""
MAX_FAILED_RESENDS = 2
"""Resends of one frame that do not decode before the link is broken. Transport damage does not happen three times."""
UNREADABLE_GAP_S = 2.0
"""Seconds that a gap must last before bytes without a readable header break the link. Bytes of another sender may
arrive before the resent frame, but a resend takes less time.
"""
MAX_RETIRED = 8
"""Ended incarnations that are remembered, so that their late frames are not followed. A worker restarts rarely."""


class FrameVerdict(enum.Enum):
    """The result of a received frame."""

    ACCEPTED = enum.auto()
    """The next frame. The client must read its content now."""
    HEARTBEAT = enum.auto()
    """A frame without content. It may show that frames are missing."""
    DUPLICATE = enum.auto()
    """A frame that was accepted before."""
    GAP = enum.auto()
    """Frames before this one are missing. The worker will send this frame again with them."""
    STALE = enum.auto()
    """A frame of an ended link, or of an ended incarnation of either side."""
    UNREADABLE = enum.auto()
    """The frame does not decode, and counts as missing."""
    SKIPPED = enum.auto()
    """The next frame. It does not decode and names one request, which fails. The link continues after this frame."""
    BROKEN = enum.auto()
    """The frame does not decode, and neither did its resends. The link and all its requests are lost."""


class LinkReceiver:
    """Follows the links of one incarnation of a worker.

    The receiver follows one link at a time.

    Args:
        client_incarnation: incarnation of this client; frames for another incarnation are stale.

    Attributes:
        incarnation: the worker's incarnation, from its first frame; None before that. Frames of another one are stale.
        link: the number of the link within that incarnation.
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
        # For the next frame: since when the client asks for it, if the last resend failed to decode, and the number of
        # such resends.
        self._missing_since: float | None = None
        self._is_answered = False
        self._num_failed = 0
        self.is_broken = False
        """True if the link is over and its worker has not opened the next link yet."""

    def __repr__(self) -> str:
        """Return one line with counts."""
        gap = f" of {self._announced}" if self._has_gap else ""
        return f"<LinkReceiver {self.incarnation}/{self.link} next={self._next}{gap} offset={self._offset}>"

    @property
    def _has_gap(self) -> bool:
        return self._next < self._announced

    @property
    def has_unacked(self) -> bool:
        """True if the client has accepted frames that it has not acknowledged."""
        return self._unacked_frames > 0

    def is_new_link(self, frame: Frame | FrameHeader) -> bool:
        """Return True if the frame opens a later link than the present one.

        The data of the present link is lost then.
        """
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
        """Handle a frame of `num_bytes`. Follow a new link from this frame on."""
        if self._is_stale(frame):
            return FrameVerdict.STALE
        if frame.link != self.link:
            self._start_link(frame)
        if frame.is_heartbeat:
            # A heartbeat has the true number of frames, also if an earlier frame claimed more.
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
        """Handle `num_bytes` that arrived on the subject of this link and do not decode.

        Args:
            header: the readable header; None: there is none.
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
        # The worker has sent this frame, so no other resend of it is in flight.
        self._asked_at = None
        self._check_gap(now)
        return self._break_after(True)

    def _count_failed_resend(self) -> None:
        """Count the last requested resend as failed, once."""
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
        """Accept the next frame."""
        self._next += 1
        self._offset += num_bytes
        self._unacked_frames += 1
        self._unacked_bytes += num_bytes
        # The missing frames are in flight. Another request would only duplicate them.
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
        """Return True if an ack is due: many frames or bytes have arrived since the last ack, or frames are missing."""
        return (
            self._wants_resend
            or self._unacked_frames >= MAX_UNACKED_FRAMES
            or 4 * self._unacked_bytes >= max(window, 1)
        )

    def message(self, *, window: int, now: float, abort: Sequence[RequestKey] = ()) -> LinkMessage:
        """Return the message for the worker: received frames, credit, missing frames and aborts.

        Args:
            window: bytes that may be in flight. Credit that was granted before stays valid.
            abort: requests to abort.
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
        return self._make_message(abort, self._next, self._credit, resend=resend)

    def _make_message(
        self, abort: Sequence[RequestKey], acked: int, credit: int = 0, *, resend: bool = False
    ) -> LinkMessage:
        incarnation, link = self.incarnation or "", self.link or 0
        return LinkMessage(
            WIRE_VERSION, list(abort), self._client_incarnation, incarnation, link, acked, credit, resend
        )

    def break_messages(self, abort: Sequence[RequestKey] = ()) -> tuple[LinkMessage, LinkMessage]:
        """Return two messages for the worker of a broken link, in order.

        The worker then drops it and opens the next link. The second message asks for a frame that the first message
        acknowledges. The worker concludes that the client has lost its position. If the very first frame does not
        decode, the first message acknowledges it for this purpose.
        """
        acked = max(self._next, 1)
        return self._make_message(abort, acked), self._make_message([], acked - 1, resend=True)


class FollowedLinks:
    """Follows the links of all workers with one id.

    Usually these are the links of one incarnation. A new incarnation ends the one before: a worker that restarts, or
    fences itself, has lost its links. If both incarnations publish presence, two workers have one id by mistake. Then
    the client follows both, so that its requests at both complete.

    Args:
        client_incarnation: incarnation of this client; frames for another incarnation are stale.
    """

    def __init__(self, client_incarnation: str) -> None:
        self._client_incarnation = client_incarnation
        self._receivers: dict[str, LinkReceiver] = {}
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)

    @property
    def receivers(self) -> Collection[LinkReceiver]:
        """The receivers of the incarnations that are followed."""
        return self._receivers.values()

    def receiver_of(self, frame: Frame | FrameHeader, live: Collection[str]) -> tuple[LinkReceiver | None, list[str]]:
        """Return the receiver of `frame`, and the incarnations whose link is lost with all its requests.

        Args:
            live: incarnations that publish presence under this id.

        Returns:
            None in place of the receiver if the frame is stale.
        """
        incarnation = frame.incarnation
        if frame.client_incarnation != self._client_incarnation:
            return None, []
        receiver = self._receivers.get(incarnation)
        if receiver is not None:
            return receiver, [incarnation] if receiver.is_new_link(frame) else []
        is_namesake = incarnation in live and len(live) > 1
        if incarnation in self._retired and not is_namesake:
            return None, []
        ended = [other for other in self._receivers if not (is_namesake and other in live)]
        self._retire(ended)
        receiver = self._receivers[incarnation] = LinkReceiver(self._client_incarnation)
        return receiver, ended

    def prune(self, live: Collection[str]) -> None:
        """If several links are followed, remove those whose workers no longer publish presence."""
        if len(self._receivers) > 1:
            self._retire([incarnation for incarnation in self._receivers if incarnation not in live])

    def _retire(self, incarnations: Iterable[str]) -> None:
        for incarnation in incarnations:
            del self._receivers[incarnation]
            self._retired.append(incarnation)
