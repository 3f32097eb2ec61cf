"""The worker's half of a link: what one client's requests have to be sent becomes numbered frames, kept until acked.

Invariant: the frames of a link are numbered from 0 without a gap, never change once they are sealed, and stay here
until the client says that they have arrived. Chunks leave their requests only as credit allows; without it they gather
and are merged, so that memory is bounded by the requests in flight.
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ....schemas.chunk import Chunk, ChunkError
from ....schemas.errors import RemoteProtocolError
from ....schemas.limits import INITIAL_CREDIT_BYTES
from ....schemas.messages import WIRE_VERSION, Frame, LinkMessage, RequestKey, encode
from ..stream.chunk_sizes import chunk_bytes
from ..stream.chunk_writer import SEGMENT_BYTES, ChunkWriter
from ..stream.engine_step import RequestStep
from .frame_builder import MAX_FRAME_BYTES, FrameBuilder

__all__ = ["SMALL_BYTES", "LinkInstructions", "LinkSender"]

SMALL_BYTES = 16 * 1024
"""A chunk up to this size goes with the next frame; larger ones go one per frame, behind everything small."""
MIN_SEGMENT_BYTES = 32 * 1024
"""However small the client's window is: smaller ones cost more than they move."""
SEGMENTS_PER_WINDOW = 4
"""With fewer on their way the link would stand still until each is acknowledged. And a thousand workers that all have a
large result for one client overrun its windows by no more than a part each."""
MAX_UNACKED_BYTES = 64 * 1024 * 1024
"""Kept for a client that grants credit without end but acknowledges nothing: many times the window of one that does.
Beyond it data gathers where it can be given up."""


@dataclass(frozen=True, slots=True)
class LinkInstructions:
    """What a client's message about its link calls for."""

    resend: list[bytes] = field(default_factory=list)
    """Frames to publish again, in order."""
    confirmed: list[RequestKey] = field(default_factory=list)
    """Requests whose offer has arrived."""
    needs_new_link: bool = False
    """The client asks for frames that it had acknowledged: it has lost its place, and only a new link helps."""


class LinkSender:
    """What a worker has for one life of one client.

    Args:
        incarnation: of the worker.
        link: which of this incarnation's links it is.
        client_incarnation: who it is for.
        max_frame_bytes: no frame exceeds it, unless a single chunk does.
    """

    def __init__(self, *, incarnation: str, link: int, client_incarnation: str, max_frame_bytes: int) -> None:
        self.incarnation = incarnation
        self.link = link
        self.client_incarnation = client_incarnation
        self._max_frame_bytes = min(max_frame_bytes, MAX_FRAME_BYTES)
        self._small_bytes = min(SMALL_BYTES, self._max_frame_bytes)
        self._open: dict[RequestKey, ChunkWriter] = {}
        self._offers: deque[RequestKey] = deque()
        # Terminal chunks of requests that have left, with nothing of theirs before them: they need no credit.
        self._terminals: deque[Chunk] = deque()
        # Requests with something unsent: in order of their first unsent step, and those whose turn for a part comes.
        self._touched: dict[RequestKey, ChunkWriter] = {}
        self._large: OrderedDict[RequestKey, ChunkWriter] = OrderedDict()
        self._unsent_bytes = 0
        # Frames sealed and not acknowledged, with the offers in each: numbers `_acked` to `_number` - 1.
        self._unacked: deque[tuple[bytes, list[RequestKey]]] = deque()
        self._unacked_bytes = 0
        self._acked = self._number = 0
        self._offset = 0
        self._credit = INITIAL_CREDIT_BYTES
        self._is_stalled = False
        self.credit_stalls = 0
        """How often chunks had to wait, and to be merged, for want of credit: a stall ends when there is credit."""

    def __repr__(self) -> str:
        """One line with counts."""
        return (
            f"<LinkSender {self.incarnation}/{self.link} to {self.client_incarnation} open={len(self._open)} "
            f"frames={self._acked}..{self._number} offset={self._offset}/{self._credit} held={self.held_bytes}>"
        )

    @property
    def keys(self) -> Collection[RequestKey]:
        """Open requests: those whose terminal chunk has not left for a frame."""
        return self._open.keys()

    @property
    def num_frames(self) -> int:
        """Frames numbered so far; heartbeats do not count."""
        return self._number

    @property
    def held_bytes(self) -> int:
        """Of what the client has not taken: unsent, or sent and not acknowledged."""
        return self._unsent_bytes + self._unacked_bytes

    @property
    def is_idle(self) -> bool:
        """Nothing is open, unsent or unacknowledged."""
        return not (self._open or self._offers or self._terminals or self._unacked)

    @property
    def is_overrun(self) -> bool:
        """Twice as much is kept as credit allows: offers and refusals need none, and the client reads nothing."""
        return self._unacked_bytes > 2 * MAX_UNACKED_BYTES

    @property
    def needs_heartbeat(self) -> bool:
        """The client may wait for something that was lost."""
        return bool(self._unacked or self._open)

    @property
    def segment_bytes(self) -> int:
        """What a large chunk should take at most: by the client's window, as it said it last."""
        acked_bytes = self._offset - self._unacked_bytes
        window = self._credit - acked_bytes
        return min(max(window // SEGMENTS_PER_WINDOW, MIN_SEGMENT_BYTES), SEGMENT_BYTES)

    def unsent_bytes(self, key: RequestKey) -> int:
        """Of an open request; 0 if it is not open."""
        writer = self._open.get(key)
        return 0 if writer is None else writer.unsent_bytes

    def open(self, key: RequestKey, writer: ChunkWriter) -> None:
        """Take a request on: the next frame offers it.

        Raises:
            ValueError: it is open already.
        """
        if key in self._open:
            raise ValueError(f"request {key} is open")
        writer.segment_bytes = min(writer.segment_bytes, self.segment_bytes)
        self._open[key] = writer
        self._offers.append(key)

    def offer_again(self, key: RequestKey) -> None:
        """Have the next frame offer a request once more, if it is open."""
        if key in self._open:
            self._offers.append(key)

    def reject(self, key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """Answer a request that is not open with its terminal chunk.

        Raises:
            ValueError: it is open: `fail` ends it.
        """
        if key in self._open:
            raise ValueError(f"request {key} is open")
        writer = ChunkWriter(key, prompt_len=0, routing=None, start=0, segment_bytes=self._small_bytes)
        self._add_terminal(writer.fail(error, weight_version))

    def add_step(
        self, key: RequestKey, step: RequestStep, weight_version: int, lora_version: int | None = None
    ) -> None:
        """Take what an engine step added to an open request; the versions are of what sampled it.

        Raises:
            LocalProtocolError: as `ChunkWriter.add_step`; nothing was taken.
            KeyError: it is not open.
        """
        writer = self._open[key]
        before = writer.unsent_bytes
        writer.add_step(step, weight_version, lora_version)
        self._unsent_bytes += writer.unsent_bytes - before
        if writer.is_ended and not writer.unsent_bytes:
            self._finish(key, writer)
        elif key not in self._large:
            self._touched[key] = writer

    def _finish(self, key: RequestKey, writer: ChunkWriter) -> None:
        """The terminal chunk alone is left of a request."""
        chunk = writer.next_chunk()
        self._remove(key)
        if chunk is not None:
            self._add_terminal(chunk)

    def fail(self, key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """End an open request with `error`; what is unsent of it is dropped.

        Raises:
            KeyError: it is not open.
        """
        self._add_terminal(self._discard(key).fail(error, weight_version))

    def abort(self, key: RequestKey, weight_version: int) -> None:
        """End an open request that its client does not want; what is unsent of it is dropped.

        Raises:
            KeyError: it is not open.
        """
        self._add_terminal(self._discard(key).abort(weight_version))

    def _discard(self, key: RequestKey) -> ChunkWriter:
        writer = self._open[key]
        self._unsent_bytes -= writer.unsent_bytes
        self._remove(key)
        return writer

    def _add_terminal(self, chunk: Chunk) -> None:
        self._terminals.append(chunk)
        self._unsent_bytes += chunk_bytes(chunk)

    def _remove(self, key: RequestKey) -> None:
        del self._open[key]
        self._touched.pop(key, None)
        self._large.pop(key, None)

    def seal(self) -> bytes | None:
        """The next frame that may be sent now; None when there is none. Call it again until then.

        First come all offers, then chunks that need no credit, then one large chunk: it holds up nothing else for
        longer than its own sending takes.
        """
        draft = FrameBuilder(self._max_frame_bytes)
        credit = min(self._credit - self._offset, MAX_UNACKED_BYTES - self._unacked_bytes)
        self._is_stalled = self._is_stalled and credit <= 0
        if self._add_offers(draft) and self._add_terminals(draft):
            if credit > 0:
                # What gathered without credit must not overshoot the first that comes by a whole frame of the largest.
                draft.room = min(draft.room, max(credit, self.segment_bytes))
                if self._add_small(draft):
                    self._add_large(draft)
            elif not self._is_stalled and (self._touched or self._large):
                self._is_stalled = True
                self.credit_stalls += 1
        return None if draft.is_empty else self._number_frame(draft)

    def _add_offers(self, draft: FrameBuilder) -> bool:
        """Add offers; False where some did not fit: no chunk may be ahead of its request's offer."""
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
        return True

    def _add_small(self, draft: FrameBuilder) -> bool:
        """Add all small chunks, setting aside requests whose next is large; False where some did not fit."""
        touched, self._touched = self._touched, {}
        rest = iter(touched.items())
        for key, writer in rest:
            while self._add_next(draft, key, writer, min(self._small_bytes, draft.room)) and writer.has_unsent:
                pass
            if not writer.has_unsent:
                continue
            if writer.next_bytes > self._small_bytes:
                self._large[key] = writer
                continue
            self._touched = {key: writer, **dict(rest)}
            return False
        return True

    def _add_large(self, draft: FrameBuilder) -> None:
        """Add the next part of the request whose turn it is."""
        if not self._large:
            return
        key, writer = next(iter(self._large.items()))
        if not self._add_next(draft, key, writer, None if draft.is_empty else draft.room):
            return
        del self._large[key]
        if writer.next_bytes > self._small_bytes:
            self._large[key] = writer
        elif writer.has_unsent:
            self._touched[key] = writer

    def _add_next(self, draft: FrameBuilder, key: RequestKey, writer: ChunkWriter, max_bytes: int | None) -> bool:
        """Add a request's next chunk; False where it is larger than `max_bytes`."""
        before = writer.unsent_bytes
        chunk = writer.next_chunk(max_bytes)
        if chunk is None:
            return False
        self._unsent_bytes -= before - writer.unsent_bytes
        draft.add(chunk, writer.last_bytes)
        if chunk.end is not None:
            del self._open[key]
        return True

    def _number_frame(self, draft: FrameBuilder) -> bytes:
        frame = Frame(
            WIRE_VERSION,
            self.incarnation,
            self._number,
            draft.admitted,
            draft.chunks,
            self.link,
            self.client_incarnation,
        )
        data = encode(frame)
        self._unacked.append((data, draft.admitted))
        self._unacked_bytes += len(data)
        self._number += 1
        self._offset += len(data)
        return data

    def heartbeat(self) -> bytes:
        """A frame that says how far the link is: it is neither numbered nor kept, and needs no credit."""
        return encode(Frame(WIRE_VERSION, self.incarnation, self._number, [], [], self.link, self.client_incarnation))

    def receive(self, message: LinkMessage) -> LinkInstructions:
        """Take what the client says of this link; messages about another, and outdated ones, change nothing.

        Raises:
            RemoteProtocolError: it acknowledges frames that were never sent; nothing was taken.
        """
        about = message.client_incarnation, message.incarnation, message.link
        if about != (self.client_incarnation, self.incarnation, self.link):
            return LinkInstructions()
        if message.acked > self._number:
            raise RemoteProtocolError(f"frames up to {message.acked} were acknowledged, {self._number} were sent")
        self._credit = max(self._credit, message.credit)
        if message.acked < self._acked:
            return LinkInstructions(needs_new_link=message.resend)
        confirmed: list[RequestKey] = []
        while self._acked < message.acked:
            data, admitted = self._unacked.popleft()
            self._unacked_bytes -= len(data)
            confirmed += admitted
            self._acked += 1
        resend = [data for data, _ in self._unacked] if message.resend else []
        return LinkInstructions(resend, confirmed)
