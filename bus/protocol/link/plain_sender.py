"""The worker's half of plain mode: puts one request into frames for a program without a link."""

from ....schemas.chunk import Chunk, ChunkError
from ....schemas.messages import Frame, RequestKey, encode
from ....schemas.wire_version import WIRE_VERSION
from ..stream.chunk_sizes import chunk_bytes
from ..stream.chunk_writer import ChunkWriter
from ..stream.engine_step import RequestStep
from .frame_builder import MAX_FRAME_BYTES, FrameBuilder

__all__ = ["PlainSender"]


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

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<PlainSender {self._key.request_id} frames={self._number}>"

    @property
    def has_left(self) -> bool:
        """True if `frames` has returned the terminal chunk."""
        return self._writer.has_left and self._terminal is None

    def add_step(
        self, key: RequestKey, step: RequestStep, weight_version: int, lora_version: int | None = None
    ) -> None:
        """Add the output of an engine step to request `key`, the only one.

        The versions are those that sampled the output.

        Raises:
            LocalProtocolError: as `ChunkWriter.add_step`; nothing was added.
        """
        self._writer.add_step(step, weight_version, lora_version)

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
