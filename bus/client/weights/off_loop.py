"""Reads the content of an object off the event loop."""

import asyncio
from collections.abc import AsyncIterator

from .packing import Piece, StoredObject

__all__ = ["read_off_loop"]


async def read_off_loop(stored: StoredObject) -> AsyncIterator[Piece]:
    """Yield an object's content, one tensor at a time, computed on a thread."""
    pieces = stored.pieces()
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
