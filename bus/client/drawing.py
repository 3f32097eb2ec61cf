"""Draws items from an iterable or async iterable of the caller, one at a time and only on demand."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Drawing"]

T = TypeVar("T")


class Drawing(Generic[T]):
    """Draws items from one source. Use it from the caller's loop.

    Args:
        source: iterable or async iterable of the caller.
        wake: called when an async iterable has returned an item, ended or raised an error.
    """

    def __init__(self, source: Iterable[T] | AsyncIterable[T], wake: Callable[[], None]) -> None:
        self._source = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
        self._wake = wake
        # At most one task. It stays until `pop` reads its item: cancelling it would end an async generator.
        self._next: asyncio.Task[T] | None = None

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<Drawing {'idle' if self._next is None else 'drawing'}>"

    @property
    def is_ready(self) -> bool:
        """True if `pop` has an item or the end. If False, the next item is being drawn, and `wake` will be called."""
        if isinstance(self._source, Iterator):
            return True
        if self._next is None:
            self._next = self._start(self._source)
        return self._next.done()

    def _start(self, source: AsyncIterator[T]) -> asyncio.Task[T]:
        async def draw() -> T:
            return await anext(source)

        # Not in a task group: a failure would cancel the caller's task, also while it runs other code.
        drawing = asyncio.get_running_loop().create_task(draw(), name="client.draw")
        drawing.add_done_callback(lambda _: self._wake())
        return drawing

    def pop(self) -> T:
        """Return the next item. Call this only if `is_ready`.

        Raises:
            StopIteration: the source has ended. An async source raises `StopAsyncIteration`.
            Exception: the source raised it.
        """
        if isinstance(self._source, Iterator):
            return next(self._source)
        if self._next is None:
            raise RuntimeError("no item is being drawn; check `is_ready` before `pop`")
        drawing, self._next = self._next, None
        return drawing.result()

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # Retrieve the error: asyncio warns about errors that no code has retrieved.
                self._next.exception()
