"""The worker's half of a link: puts the output for one client into numbered frames and keeps them until the frame ack.

Invariant: the frames of a link are numbered from 0 without a gap. A sealed frame never changes and is kept until the
client acknowledges it. Chunks go into frames only while the link has credit. Without credit, the requests buffer and
merge their output, so memory is bounded by the requests in flight.
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ....schemas.chunk import Chunk, ChunkError
from ....schemas.decoding import WIRE_VERSION
from ....schemas.errors import RemoteProtocolError
from ....schemas.limits import INITIAL_CREDIT_BYTES, MAX_CHUNKS_PER_FRAME
from ....schemas.messages import Frame, LinkMessage, RequestKey, encode
from .chunk_writer import CHUNK_OVERHEAD_BYTES, SEGMENT_BYTES, ChunkWriter, chunk_bytes
from .engine_step import RequestStep

MAX_FRAME_BYTES = MAX_CHUNKS_PER_FRAME * CHUNK_OVERHEAD_BYTES
"""The largest frame, also if the server allows more. So no frame has more offers or chunks than the limit of the
format."""
SMALL_BYTES = 16 * 1024
"""The largest small chunk in bytes. Small chunks go into the next frame. A large chunk goes into a frame after all
small chunks, one per frame.
"""
MIN_SEGMENT_BYTES = 32 * 1024
"""The smallest segment in bytes, also for a smaller client window: smaller segments cost more than they transfer."""
SEGMENTS_PER_WINDOW = 4
"""Segments per window. With fewer in flight, the link would wait for each frame ack. If a thousand workers each have a
large result for one client, they exceed its windows by at most one segment each.
"""
MAX_UNACKED_BYTES = 64 * 1024 * 1024
"""The limit for a client that grants unlimited credit but sends no frame acks: many times a usual window. Beyond this
limit, output is buffered at its requests, where it can be discarded.
"""


class FrameBuilder:
    """A frame while it is filled.

    It takes offers and chunks, as many as fit.

    Args:
        max_bytes: the maximum bytes of its offers and chunks. A larger chunk gets its own frame.
    """

    def __init__(self, max_bytes: int) -> None:
        self.admitted: list[RequestKey] = []
        self.chunks: list[Chunk] = []
        self.room = max_bytes

    @property
    def is_empty(self) -> bool:
        """True if the frame has no offers and no chunks."""
        return not self.admitted and not self.chunks

    def fits(self, num_bytes: int) -> bool:
        """Return True if there is room. Data that fits no frame gets a frame of its own."""
        return num_bytes <= self.room or self.is_empty

    def offer(self, key: RequestKey) -> bool:
        """Add an offer. Return False if it does not fit."""
        num_bytes = CHUNK_OVERHEAD_BYTES + len(key.request_id.encode())
        if not self.fits(num_bytes):
            return False
        self.admitted.append(key)
        self.room -= num_bytes
        return True

    def add(self, chunk: Chunk, num_bytes: int) -> None:
        """Add a chunk that fits."""
        self.chunks.append(chunk)
        self.room -= num_bytes


@dataclass(frozen=True, slots=True)
class LinkInstructions:
    """The actions that a client's link message requires."""

    resend: list[bytes] = field(default_factory=list)
    """Frames to publish again, in order."""
    confirmed: list[RequestKey] = field(default_factory=list)
    """Requests whose offer the client has acknowledged."""
    needs_new_link: bool = False
    """True if the client asks for frames that it had acknowledged. It has lost its position and needs a new link."""


class LinkSender:
    """The output of a worker for one incarnation of one client.

    Args:
        incarnation: incarnation of the worker.
        link: the number of the link within this incarnation.
        client_incarnation: incarnation of the receiving client.
        max_frame_bytes: the largest frame, unless a single chunk is larger.
    """

    def __init__(self, *, incarnation: str, link: int, client_incarnation: str, max_frame_bytes: int) -> None:
        self.incarnation = incarnation
        self.link = link
        self.client_incarnation = client_incarnation
        self._max_frame_bytes = min(max_frame_bytes, MAX_FRAME_BYTES)
        self._small_bytes = min(SMALL_BYTES, self._max_frame_bytes)
        self._open: dict[RequestKey, ChunkWriter] = {}
        self._offers: deque[RequestKey] = deque()
        # Terminal chunks of requests that have ended and have no other unsent output. They need no credit.
        self._terminals: deque[Chunk] = deque()
        # Output of aborted requests in these chunks. It needs credit.
        self._kept_bytes = 0
        # Requests with unsent output: in the order of their first unsent step, and in the order of their turn for a
        # segment.
        self._touched: dict[ChunkWriter, None] = {}
        self._large: OrderedDict[ChunkWriter, None] = OrderedDict()
        self._unsent_bytes = 0
        # Sealed frames without a frame ack, with the offers in each: numbers `_acked` to `num_frames` - 1.
        self._unacked: deque[tuple[bytes, list[RequestKey]]] = deque()
        self._unacked_bytes = 0
        self._acked = self._offset = 0
        self.num_frames = 0
        """The number of frames so far, without heartbeats."""
        self._credit = INITIAL_CREDIT_BYTES
        self._set_segment_bytes()
        self._is_stalled = False
        self.credit_stalls = 0
        """How often chunks had to wait and to be merged for lack of credit. A stall ends when there is credit."""

    @property
    def keys(self) -> Collection[RequestKey]:
        """The open requests: those whose terminal chunk is not in a frame yet."""
        return self._open.keys()

    @property
    def held_bytes(self) -> int:
        """The buffered bytes: unsent, or sent and not acknowledged."""
        return self._unsent_bytes + self._unacked_bytes

    @property
    def is_idle(self) -> bool:
        """True if no request is open and no output is unsent or unacknowledged."""
        return not (self._open or self._offers or self._terminals or self._unacked)

    @property
    def is_overrun(self) -> bool:
        """True if twice the allowed bytes are unacknowledged.

        Offers and rejections need no credit, and the client reads none.
        """
        return self._unacked_bytes > 2 * MAX_UNACKED_BYTES

    @property
    def needs_heartbeat(self) -> bool:
        """True if the client may wait for a lost frame."""
        return bool(self._unacked or self._open)

    def _set_segment_bytes(self) -> None:
        # The bytes of a frame that was sent count in both of the last two.
        window = self._credit + self._unacked_bytes - self._offset
        self.segment_bytes = min(max(window // SEGMENTS_PER_WINDOW, MIN_SEGMENT_BYTES), SEGMENT_BYTES)
        """The largest segment of a large chunk in bytes, by the last window of the client."""

    def unsent_bytes(self, key: RequestKey) -> int:
        """Return the unsent bytes of an open request; 0 if it is not open."""
        writer = self._open.get(key)
        return 0 if writer is None else writer.unsent_bytes

    def open(self, key: RequestKey, writer: ChunkWriter) -> None:
        """Add a request, which the next frame offers.

        Raises:
            ValueError: it is open already.
        """
        if key in self._open:
            raise ValueError(f"request {key} is open")
        writer.segment_bytes = min(writer.segment_bytes, self.segment_bytes)
        self._open[key] = writer
        self._offers.append(key)

    def offer_again(self, key: RequestKey) -> None:
        """Offer a request again in the next frame, if it is open."""
        if key in self._open:
            self._offers.append(key)

    def reject(self, key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """Reject a request that is not open with a terminal chunk.

        Raises:
            ValueError: it is open; use `fail`.
        """
        if key in self._open:
            raise ValueError(f"request {key} is open")
        writer = ChunkWriter(key, prompt_len=0, routing=None, start=0, segment_bytes=self._small_bytes)
        self._add_terminal(writer.fail(error, weight_version))

    def encode_step(
        self, key: RequestKey, step: RequestStep, weight_version: int, lora_version: int | None = None
    ) -> None:
        """Add the output of an engine step to an open request. The versions are those that sampled the output.

        Raises:
            LocalProtocolError: as `ChunkWriter.append_step`; nothing was added.
            KeyError: it is not open.
        """
        writer = self._open[key]
        before = writer.unsent_bytes
        writer.append_step(step, weight_version, lora_version)
        if writer.is_ended and not writer.unsent_bytes:
            self._finish(writer)
        else:
            self.touch(writer, writer.unsent_bytes - before)

    def touch(self, writer: ChunkWriter, num_bytes: int) -> None:
        """Note that the caller has added output of this many bytes to the writer of an open request."""
        self._unsent_bytes += num_bytes
        if writer not in self._large:
            self._touched[writer] = None

    def hold(self, key: RequestKey) -> None:
        """Let the unsent output of an open request wait until it is touched again."""
        self._touched.pop(self._open[key], None)

    def _finish(self, writer: ChunkWriter) -> None:
        """Move the terminal chunk, the only unsent output of a request, to the terminal chunks."""
        chunk = writer.next_chunk()
        self._remove(writer)
        if chunk is not None:
            self._add_terminal(chunk)

    def fail(self, key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """End an open request with `error`, and discard its unsent output.

        Raises:
            KeyError: it is not open.
        """
        self._add_terminal(self._discard(key).fail(error, weight_version))

    def abort(self, key: RequestKey, weight_version: int) -> None:
        """Abort an open request on its client's wish.

        The terminal chunk has the unsent output if it is small and there is credit. Otherwise the output is discarded.

        Raises:
            KeyError: it is not open.
        """
        writer = self._discard(key)
        room = min(self._credit - self._offset, MAX_UNACKED_BYTES - self._unacked_bytes) - self._kept_bytes
        num_bytes = writer.next_bytes
        keeps = 0 < num_bytes <= min(self._small_bytes, room)
        if keeps:
            self._kept_bytes += num_bytes
        self._add_terminal(writer.abort(weight_version, keeps=keeps))

    def _discard(self, key: RequestKey) -> ChunkWriter:
        writer = self._open[key]
        self._unsent_bytes -= writer.unsent_bytes
        self._remove(writer)
        return writer

    def _add_terminal(self, chunk: Chunk) -> None:
        self._terminals.append(chunk)
        self._unsent_bytes += chunk_bytes(chunk)

    def _remove(self, writer: ChunkWriter) -> None:
        del self._open[writer.key]
        self._touched.pop(writer, None)
        self._large.pop(writer, None)

    def seal(self) -> bytes | None:
        """Return the next frame that may be sent now; None if there is none. Call this until it returns None.

        All offers come first, then chunks that need no credit, then small chunks, then one large chunk. So a large
        chunk delays other output only for the time of its own transfer.
        """
        draft = FrameBuilder(self._max_frame_bytes)
        credit = min(self._credit - self._offset, MAX_UNACKED_BYTES - self._unacked_bytes)
        self._is_stalled = self._is_stalled and credit <= 0
        if self._add_offers(draft) and self._add_terminals(draft):
            if credit > 0:
                # Output that was buffered without credit must not exceed the first new credit by a whole frame of the
                # largest size.
                draft.room = min(draft.room, max(credit, self.segment_bytes))
                if self._add_small(draft):
                    self._add_large(draft)
            elif not self._is_stalled and (self._touched or self._large):
                self._is_stalled = True
                self.credit_stalls += 1
        return None if draft.is_empty else self._number_frame(draft)

    def _add_offers(self, draft: FrameBuilder) -> bool:
        """Add offers. Return False if some did not fit: no chunk may go before the offer of its request."""
        while self._offers:
            if not draft.offer(self._offers[0]):
                return False
            self._offers.popleft()
        return True

    def _add_terminals(self, draft: FrameBuilder) -> bool:
        while self._terminals:
            num_bytes = chunk_bytes(self._terminals[0])
            if not draft.fits(num_bytes):
                return False
            draft.add(self._terminals.popleft(), num_bytes)
            self._unsent_bytes -= num_bytes
        self._kept_bytes = 0
        return True

    def _add_small(self, draft: FrameBuilder) -> bool:
        """Add all small chunks and set aside requests whose next chunk is large. Return False if some did not fit."""
        touched, self._touched = self._touched, {}
        rest = iter(touched)
        for writer in rest:
            while self._add_next(draft, writer, min(self._small_bytes, draft.room)):
                if not (writer.unsent_bytes or writer.is_ended) or not writer.has_unsent:
                    break
            else:
                if writer.next_bytes > self._small_bytes:
                    self._large[writer] = None
                elif writer.has_unsent:
                    self._touched = {writer: None, **dict.fromkeys(rest)}
                    return False
        return True

    def _add_large(self, draft: FrameBuilder) -> None:
        """Add the next segment of the request whose turn it is."""
        if not self._large:
            return
        writer = next(iter(self._large))
        if not self._add_next(draft, writer, None if draft.is_empty else draft.room):
            return
        del self._large[writer]
        if writer.next_bytes > self._small_bytes:
            self._large[writer] = None
        elif writer.has_unsent:
            self._touched[writer] = None

    def _add_next(self, draft: FrameBuilder, writer: ChunkWriter, max_bytes: int | None) -> bool:
        """Add the next chunk of a request. Return False if the chunk is larger than `max_bytes`."""
        before = writer.unsent_bytes
        chunk = writer.next_chunk(max_bytes)
        if chunk is None:
            return False
        self._unsent_bytes -= before - writer.unsent_bytes
        draft.add(chunk, writer.last_bytes)
        if chunk.end is not None:
            del self._open[writer.key]
        return True

    def _number_frame(self, draft: FrameBuilder) -> bytes:
        data = self._encode_frame(draft.admitted, draft.chunks)
        self._unacked.append((data, draft.admitted))
        self._unacked_bytes += len(data)
        self.num_frames += 1
        self._offset += len(data)
        return data

    def heartbeat(self) -> bytes:
        """Return a frame with the number of frames so far. It has no number, is not kept and needs no credit."""
        return self._encode_frame([], [])

    def _encode_frame(self, admitted: list[RequestKey], chunks: list[Chunk]) -> bytes:
        number, client = self.num_frames, self.client_incarnation
        return encode(Frame(WIRE_VERSION, self.incarnation, number, admitted, chunks, self.link, client))

    def receive(self, message: LinkMessage) -> LinkInstructions:
        """Handle a link message. A message about another link, or an outdated one, changes nothing.

        Raises:
            RemoteProtocolError: it acknowledges frames that were never sent; nothing was changed.
        """
        about = message.client_incarnation, message.incarnation, message.link
        if about != (self.client_incarnation, self.incarnation, self.link):
            return LinkInstructions()
        if message.acked > self.num_frames:
            raise RemoteProtocolError(
                f"the client acknowledged {message.acked} frames, but only {self.num_frames} were sent"
            )
        self._credit = max(self._credit, message.credit)
        if message.acked < self._acked:
            return LinkInstructions(needs_new_link=message.resend)
        confirmed: list[RequestKey] = []
        while self._acked < message.acked:
            data, admitted = self._unacked.popleft()
            self._unacked_bytes -= len(data)
            confirmed += admitted
            self._acked += 1
        self._set_segment_bytes()
        resend = [data for data, _ in self._unacked] if message.resend else []
        return LinkInstructions(resend, confirmed)


class PlainSender:
    """The output of one request for a program without a link: frames without credit and resends.

    Args:
        key: the request.
        writer: the writer of its chunks.
        incarnation: incarnation of the worker.
        max_frame_bytes: the largest frame, unless a single chunk is larger.
    """

    def __init__(self, key: RequestKey, writer: ChunkWriter, *, incarnation: str, max_frame_bytes: int) -> None:
        self._key = key
        self._writer = writer
        self._incarnation = incarnation
        self._max_frame_bytes = min(max_frame_bytes, MAX_FRAME_BYTES)
        self._number = 0
        self._terminal: Chunk | None = None

    @property
    def has_left(self) -> bool:
        """True if `frames` has returned the terminal chunk."""
        return self._writer.has_left and self._terminal is None

    def encode_step(
        self, key: RequestKey, step: RequestStep, weight_version: int, lora_version: int | None = None
    ) -> None:
        """Add the output of an engine step to request `key`, the only one.

        The versions are those that sampled the output.

        Raises:
            LocalProtocolError: as `ChunkWriter.append_step`; nothing was added.
        """
        self._writer.append_step(step, weight_version, lora_version)

    def touch(self, writer: ChunkWriter, num_bytes: int) -> None:
        """Do nothing: `frames` asks the writer."""

    def fail(self, key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """End request `key`, the only one, with `error`. Before the first frame, this rejects the request.

        Raises:
            LocalProtocolError: `frames` has returned its terminal chunk.
        """
        self._terminal = self._writer.fail(error, weight_version)

    def frames(self) -> list[bytes]:
        """Return all unsent output in as few frames as possible. The first frame has the offer."""
        frames: list[bytes] = []
        draft = FrameBuilder(self._max_frame_bytes)
        if self._terminal is None and not self._number:
            draft.offer(self._key)
        while self._terminal is not None or self._writer.has_unsent:
            chunk, self._terminal = self._terminal, None
            if chunk is None:
                chunk = self._writer.next_chunk(None if draft.is_empty else draft.room)
            if chunk is None:
                frames.append(self._seal(draft))
                draft = FrameBuilder(self._max_frame_bytes)
            else:
                draft.add(chunk, chunk_bytes(chunk))
        if not draft.is_empty:
            frames.append(self._seal(draft))
        return frames

    def _seal(self, draft: FrameBuilder) -> bytes:
        frame = Frame(WIRE_VERSION, self._incarnation, self._number, draft.admitted, draft.chunks)
        self._number += 1
        return encode(frame)
