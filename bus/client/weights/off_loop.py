"""The content of an object, computed off the event loop."""

import asyncio
from collections.abc import AsyncIterator

from .packing import Piece, StoredObject

__all__ = ["read_off_loop"]


async def read_off_loop(stored: StoredObject) -> AsyncIterator[Piece]:
    """Yield an object's content, a tensor at a time."""
    pieces = stored.pieces()
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
