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
        admitted: list[RequestKey] = []
        chunks: list[Chunk] = []
        size = 0
        items: list[RequestKey | Chunk] = [*self._admitted, *self._chunks]
        for item in items:
            item_bytes = chunk_bytes(item) if isinstance(item, Chunk) else CHUNK_OVERHEAD_BYTES + len(item.request_id)
            if size and size + item_bytes > self._max_frame_bytes:
                frames.append(self._frame(admitted, chunks))
                admitted, chunks, size = [], [], 0
            if isinstance(item, Chunk):
                chunks.append(item)
            else:
                admitted.append(item)
            size += item_bytes
        if size:
            frames.append(self._frame(admitted, chunks))
        self._admitted, self._chunks = [], []
        return frames

    def _frame(self, admitted: list[RequestKey], chunks: list[Chunk]) -> bytes:
        frame = Frame(WIRE_VERSION, self._incarnation, self._number, admitted, chunks)
        self._number += 1
        return encode(frame)
