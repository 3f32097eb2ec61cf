"""The outbounds of a worker. An outbound is the link to one client incarnation, or the frames of one plain request."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ...bus.protocol.stream.chunk_writer import SEGMENT_BYTES, ChunkWriter
from ...bus.protocol.stream.link_sender import LinkSender, PlainSender
from ...bus.queue.puller import QueuedRequest
from ...bus.subjects import Subjects
from ...schemas.messages import RequestKey

MAX_FRAME_BYTES = 512 * 1024
"""Maximum bytes of a frame: larger messages are not faster, and they delay the frames behind them."""
FRAME_MARGIN_BYTES = 4096
"""Bytes reserved for the other fields of a frame, and again for the other fields of a chunk."""


class OutgoingFrame(NamedTuple):
    """One frame to be published."""

    subject: str
    data: bytes
    message: QueuedRequest | None = None
    """The queue message to ack after the frame is published, or None."""


class OutboundLink:
    """The link to one incarnation of one client. Its frames go to `subject`."""

    def __init__(self, client: str, subject: str, sender: LinkSender) -> None:
        self.client = client
        self.incarnation = sender.client_incarnation
        """Incarnation of the client."""
        self.subject = subject
        self.sender = sender
        self.needs_heartbeat = False
        """True if a heartbeat is due after the waiting frames."""
        self.lost_at: float | None = None
        """Time at which the client was marked lost, or None while it is live. A lost client keeps its frames until it
        returns or is removed."""
        self.resting_bytes = 0
        """The bytes that `OutboundRegistry` includes in its sum for this idle outbound."""
        self._resends: deque[bytes] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that the client has not acknowledged."""
        return self.sender.held_bytes

    def resend(self, frames: list[bytes]) -> None:
        """Send these frames again before all new frames. They replace the frames of an earlier call."""
        self._resends = deque(frames)

    def next_frame(self) -> OutgoingFrame | None:
        """Return the frame to publish now, or None without content or credit."""
        data = self._resends.popleft() if self._resends else self.sender.seal()
        if data is None and self.needs_heartbeat:
            self.needs_heartbeat = False
            data = self.sender.heartbeat()
        return None if data is None else OutgoingFrame(self.subject, data)


class PlainOutbound:
    """The frames for one request of a program without a link. They go to `subject`."""

    def __init__(self, subject: str, writer: ChunkWriter, sender: PlainSender, message: QueuedRequest) -> None:
        self.subject = subject
        self.message = message
        """The queue message, acked after the terminal chunk. A redelivery replaces it."""
        self.resting_bytes = 0
        """The bytes that `OutboundRegistry` includes in its sum for this idle outbound."""
        self._writer = writer
        self.sender = sender
        self._frames: deque[bytes] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that are not published yet."""
        return self._writer.unsent_bytes + sum(map(len, self._frames))

    def next_frame(self) -> OutgoingFrame | None:
        """Return the frame to publish now, or None. Only the last frame is returned with the queue message."""
        if not self._frames:
            self._frames.extend(self.sender.frames())
        if not self._frames:
            return None
        data = self._frames.popleft()
        is_last = self.sender.has_left and not self._frames
        return OutgoingFrame(self.subject, data, self.message if is_last else None)


Outbound = OutboundLink | PlainOutbound


class OutboundRegistry:
    """All outbounds of a worker. It tracks which of them may have frames to publish.

    Args:
        incarnation: incarnation of the worker.
        max_payload: limit of the NATS server in bytes. No frame is larger.
    """

    def __init__(self, worker_id: str, subjects: Subjects, incarnation: str, *, max_payload: int) -> None:
        self._worker_id = worker_id
        self._subjects = subjects
        # By client and incarnation. Two incarnations may overlap until the presence of the later one arrives.
        self._links: dict[str, dict[str, OutboundLink]] = {}
        self._plain: set[PlainOutbound] = set()
        # The outbounds that may have changed. `_resting_bytes` is the sum over all other outbounds.
        self._touched: dict[Outbound, None] = {}
        self._resting_bytes = 0
        self._past_stalls = 0
        self.on_due: Callable[[], None] = lambda: None
        """Called when there may be a frame to publish and there was none before; must not block."""
        self._begin(incarnation, max_payload)

    def _begin(self, incarnation: str, max_payload: int) -> None:
        self.incarnation = incarnation
        self._num_links = 0
        margin = min(FRAME_MARGIN_BYTES, max_payload // 4)
        self._max_frame_bytes = min(max_payload, MAX_FRAME_BYTES) - margin
        self.max_part_bytes = self._max_frame_bytes - margin
        """Maximum bytes of a row: a larger row fits into no frame."""
        self.segment_bytes = min(SEGMENT_BYTES, self.max_part_bytes)
        """Maximum bytes of a segment, for chunk writers."""

    @property
    def held_bytes(self) -> int:
        """Bytes that clients have not acknowledged, plus bytes not yet published to plain programs."""
        return self._resting_bytes + sum(outbound.held_bytes for outbound in self._touched)

    @property
    def credit_stalls(self) -> int:
        """Number of times that chunks waited for credit, on all links since the start."""
        return self._past_stalls + sum(link.sender.credit_stalls for link in self.links())

    @property
    def is_acknowledged(self) -> bool:
        """True if each live client has acknowledged all frames."""
        return not self._plain and all(link.sender.is_idle for link in self.links() if link.lost_at is None)

    def links(self) -> Iterator[OutboundLink]:
        """Iterate over all links. Do not open or remove links during the iteration."""
        for incarnations in self._links.values():
            yield from incarnations.values()

    def frame_counts(self) -> dict[str, int]:
        """Return the number of sealed frames of each link, by `<client>/<incarnation>`."""
        return {f"{link.client}/{link.incarnation}": link.sender.num_frames for link in self.links()}

    def incarnations_of(self, client: str) -> Mapping[str, OutboundLink]:
        """Return the links of a client by incarnation."""
        return self._links.get(client, {})

    def find(self, client: str, incarnation: str) -> OutboundLink | None:
        """Return the link to this incarnation of a client, or None."""
        return self._links.get(client, {}).get(incarnation)

    def link(self, client: str, incarnation: str) -> OutboundLink:
        """Return the link to this incarnation of a client. Open a link if there is none."""
        link = self.find(client, incarnation)
        if link is None:
            sender = LinkSender(
                incarnation=self.incarnation,
                link=self._num_links,
                client_incarnation=incarnation,
                max_frame_bytes=self._max_frame_bytes,
            )
            link = OutboundLink(client, self._subjects.frame(client, self._worker_id), sender)
            self._links.setdefault(client, {})[incarnation] = link
            # One counter for all clients, because a removed client that returns must get a higher link number.
            self._num_links += 1
        return link

    def open_plain(self, key: RequestKey, subject: str, writer: ChunkWriter, message: QueuedRequest) -> PlainOutbound:
        """Open the outbound of one plain request. It is removed with its last frame."""
        sender = PlainSender(key, writer, incarnation=self.incarnation, max_frame_bytes=self._max_frame_bytes)
        outbound = PlainOutbound(subject, writer, sender, message)
        self._plain.add(outbound)
        return outbound

    def remove(self, link: OutboundLink) -> None:
        """Remove a link and its frames."""
        self._past_stalls += link.sender.credit_stalls
        del self._links[link.client][link.incarnation]
        if not self._links[link.client]:
            del self._links[link.client]
        self.touch(link)
        del self._touched[link]

    def restart(self, incarnation: str, *, max_payload: int) -> None:
        """Remove everything and continue as another incarnation."""
        self._past_stalls = self.credit_stalls
        self._links.clear()
        self._plain.clear()
        self._touched.clear()
        self._resting_bytes = 0
        self._begin(incarnation, max_payload)

    def request_heartbeats(self) -> None:
        """Request a heartbeat on each link whose client may wait for a frame."""
        for link in self.links():
            if link.lost_at is None and link.sender.needs_heartbeat:
                self.request_heartbeat(link)

    def request_heartbeat(self, link: OutboundLink) -> None:
        """Request a heartbeat, which contains the number of the link and of its last frame."""
        link.needs_heartbeat = True
        self.touch(link)

    def touch(self, outbound: Outbound) -> None:
        """Mark an outbound as changed: it may have frames to publish."""
        if outbound in self._touched:
            return
        if not self._touched:
            self.on_due()
        self._resting_bytes -= outbound.resting_bytes
        outbound.resting_bytes = 0
        self._touched[outbound] = None

    def _rest(self, outbound: Outbound) -> None:
        """Mark an outbound as idle until the next `touch`."""
        del self._touched[outbound]
        outbound.resting_bytes = outbound.held_bytes
        self._resting_bytes += outbound.resting_bytes

    def sendable(self) -> list[Outbound]:
        """Return the outbounds that may have frames to publish. Publish one frame of each in turn."""
        return list(self._touched)

    def next_frame(self, outbound: Outbound) -> OutgoingFrame | None:
        """Return the next frame of an outbound, or None if it has no frame now or was removed."""
        if outbound not in self._touched:
            return None
        outgoing = outbound.next_frame()
        if outgoing is None:
            self._rest(outbound)
        elif isinstance(outbound, PlainOutbound) and outgoing.message is not None:
            del self._touched[outbound]
            self._plain.discard(outbound)
        return outgoing
