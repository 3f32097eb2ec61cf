"""Merging of several chunk streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeAlias

from ... import bus
from ...schemas.errors import RollbusError
from .calls import first_error
from .errors import HttpError

__all__ = ["merged"]

_Waiting: TypeAlias = "asyncio.Queue[tuple[int, bus.Chunk | Exception | None]]"

MAX_WAITING: Final = 64
"""Limit on received chunks that the caller has not read. Further chunks wait in their sources."""


async def merged(sources: Sequence[AsyncGenerator[bus.Chunk, None]]) -> AsyncGenerator[tuple[int, bus.Chunk], None]:
    """Yield the chunks of all sources, each with its source's index.

    Closing the generator closes the sources. An error of one source closes the others too.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for chunk in source:
                yield 0, chunk
        return
    waiting: _Waiting = asyncio.Queue(MAX_WAITING)
    open_sources = len(sources)
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            for at, source in enumerate(sources):
                tasks.create_task(_pump(at, source, waiting))
            while open_sources:
                at, item = await waiting.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_sources -= 1
                else:
                    yield at, item


async def _pump(at: int, source: AsyncGenerator[bus.Chunk, None], waiting: _Waiting) -> None:
    end: Exception | None = None
    async with aclosing(source) as chunks:
        try:
            async for chunk in chunks:
                await waiting.put((at, chunk))
        except (HttpError, RollbusError) as error:
            # The error is not raised here: it would cancel the reading task at an arbitrary point.
            end = error
    await waiting.put((at, end))
