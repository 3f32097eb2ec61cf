"""Requests whose chunks a task reads."""

import asyncio
from collections.abc import AsyncIterable
from typing import TypeVar

import rollbus
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.request import GenerateRequest

T = TypeVar("T")


class Stream:
    """A request that a task reads; `start_stream` creates it."""

    def __init__(self, request: GenerateRequest, tasks: asyncio.TaskGroup, rb: rollbus.Client) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.has_begun = asyncio.Event()
        self.reading = tasks.create_task(self._read(rb))

    async def _read(self, rb: rollbus.Client) -> None:
        async for chunk in rb.generate(self.request):
            self.chunks.append(chunk)
            if chunk.num_tokens:
                self.has_begun.set()

    @property
    def versions(self) -> list[int]:
        """The weight version of each token."""
        return [chunk.weight_version for chunk in self.chunks for _ in range(chunk.num_tokens)]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason; None if the request has not ended."""
        end = self.chunks[-1].end
        return None if end is None else end.finish_reason


async def start_stream(tasks: asyncio.TaskGroup, rb: rollbus.Client, request: GenerateRequest) -> Stream:
    """Start to read a request in a task; return after its first token."""
    stream = Stream(request, tasks, rb)
    await stream.has_begun.wait()
    return stream


async def all_of(items: AsyncIterable[T]) -> list[T]:
    """Return all items of an iterator, for use as a task."""
    return [item async for item in items]
