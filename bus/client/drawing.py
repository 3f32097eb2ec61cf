"""What a caller gives in an iterable or an async one: drawn one at a time, and no sooner than somebody asks for it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Drawing"]

T = TypeVar("T")


class Drawing(Generic[T]):
    """Draws items of one source. Use it from the caller's loop.

    Args:
        source: the caller's.
        wake: called when an async iterable has brought an item, its end, or an error.
    """

    def __init__(self, source: Iterable[T] | AsyncIterable[T], wake: Callable[[], None]) -> None:
        self._source = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
        self._wake = wake
        # One at most. It stays until `pop` has its item: to cancel it would end an async generator.
        self._next: asyncio.Task[T] | None = None

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Drawing {'idle' if self._next is None else 'drawing'}>"

    @property
    def is_ready(self) -> bool:
        """True if `pop` has an item or the end; if not, the next item is on its way, and `wake` will be called."""
        if isinstance(self._source, Iterator):
            return True
        if self._next is None:
            self._next = self._start(self._source)
        return self._next.done()

    def _start(self, source: AsyncIterator[T]) -> asyncio.Task[T]:
        async def draw() -> T:
            return await anext(source)

        # Not in a task group: that would cancel the caller's task, also while it is elsewhere.
        drawing = asyncio.get_running_loop().create_task(draw(), name="client.draw")
        drawing.add_done_callback(lambda _: self._wake())
        return drawing

    def pop(self) -> T:
        """Return the next item. Call it when `is_ready`.

        Raises:
            StopIteration: the source is at its end; an async one raises `StopAsyncIteration`.
            Exception: whatever the source raised.
        """
        if isinstance(self._source, Iterator):
            return next(self._source)
        if self._next is None:
            raise RuntimeError("no item is on its way; ask `is_ready` before")
        drawing, self._next = self._next, None
        return drawing.result()

    async def close(self) -> None:
        """Cancel the drawing that is under way, and wait until the source has cleaned up."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # asyncio complains of errors that no code has asked for.
                self._next.exception()
