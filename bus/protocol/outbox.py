"""What a worker has for one client and has not sent: numbered frames of the chunks of one engine step."""

from bus.protocol.chunking import CHUNK_OVERHEAD_BYTES, chunk_bytes
from schemas.chunk import Chunk
from schemas.messages import WIRE_VERSION, Frame, RequestKey, encode

__all__ = ["Outbox"]


class Outbox:
    """Collects what goes to one client and seals it into frames.

    Args:
        incarnation: of the worker.
        max_frame_bytes: a frame is sealed before it would exceed this; a chunk is never larger (`ChunkWriter`).
    """

    def __init__(self, incarnation: str, max_frame_bytes: int) -> None:
        self._incarnation = incarnation
        self._max_frame_bytes = max_frame_bytes
        self._number = 0
        self._admitted: list[RequestKey] = []
        self._chunks: list[Chunk] = []

    def admit(self, key: RequestKey) -> None:
        """Tell the client that its request was taken on."""
        self._admitted.append(key)

    def add(self, chunk: Chunk) -> None:
        """Send `chunk` with the next frames."""
        self._chunks.append(chunk)

    def seal(self) -> list[bytes]:
        """Encode all that was collected, as few frames as fit; empty when there is nothing."""
        frames: list[bytes] = []
        batch: list[Chunk] = []
        size = sum(CHUNK_OVERHEAD_BYTES + len(key.request_id) for key in self._admitted)
        for chunk in self._chunks:
            chunk_size = chunk_bytes(chunk)
            if batch and size + chunk_size > self._max_frame_bytes:
                frames.append(self._frame(batch))
                batch, size = [], 0
            batch.append(chunk)
            size += chunk_size
        if batch or self._admitted:
            frames.append(self._frame(batch))
        self._chunks = []
        return frames

    def _frame(self, chunks: list[Chunk]) -> bytes:
        frame = Frame(WIRE_VERSION, self._incarnation, self._number, self._admitted, chunks)
        self._number += 1
        self._admitted = []
        return encode(frame)
