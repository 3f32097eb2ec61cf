"""Several sources of chunks as one."""

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
"""Chunks that were taken and not yet handed on; the others wait where they are."""


async def merged(sources: Sequence[AsyncGenerator[bus.Chunk, None]]) -> AsyncGenerator[tuple[int, bus.Chunk], None]:
    """The chunks of all sources, each with its source's place; closing closes them, and so does an error of one."""
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
            # Not raised here: that would cancel who reads, wherever that is at this moment.
            end = error
    await waiting.put((at, end))
