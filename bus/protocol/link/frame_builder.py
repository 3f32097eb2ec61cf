"""A frame before it is sealed: offers and chunks, as many as fit."""

from ....schemas.chunk import Chunk
from ....schemas.limits import MAX_CHUNKS_PER_FRAME
from ....schemas.messages import RequestKey
from ..stream.chunk_sizes import CHUNK_OVERHEAD_BYTES

__all__ = ["MAX_FRAME_BYTES", "FrameBuilder"]

MAX_FRAME_BYTES = MAX_CHUNKS_PER_FRAME * CHUNK_OVERHEAD_BYTES
"""The largest frame, also if the server allows more. So no frame has more offers or chunks than the limit of the
format."""


class FrameBuilder:
    """A frame while it is filled.

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
