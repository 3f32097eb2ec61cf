"""Requests whose chunks are read by tasks of their own."""

import asyncio
from collections.abc import AsyncIterable
from typing import TypeVar

import rollbus
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.request import GenerateRequest

__all__ = ["Stream", "all_of", "start_stream"]

T = TypeVar("T")


class Stream:
    """A request that is being read; made by `start_stream`."""

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
        """Of the weights, for each token."""
        return [chunk.weight_version for chunk in self.chunks for _ in range(chunk.num_tokens)]

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended."""
        end = self.chunks[-1].end
        return None if end is None else end.finish_reason


async def start_stream(tasks: asyncio.TaskGroup, rb: rollbus.Client, request: GenerateRequest) -> Stream:
    """Have a request read until it ends; returns when it has a token."""
    stream = Stream(request, tasks, rb)
    await stream.has_begun.wait()
    return stream


async def all_of(items: AsyncIterable[T]) -> list[T]:
    """Read something to its end, for a task."""
    return [item async for item in items]
