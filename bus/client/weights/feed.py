"""One pass over a trainer's tensors: a thread draws and compares them, and the event loop uploads complete objects."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from ....schemas.checks import describe
from ....schemas.errors import BusClosed, InvalidRequest
from .draft import Draft
from .packing import StoredObject

__all__ = ["NamedTensors", "TensorFeed"]

MAX_WAITING: Final = 2
"""Maximum number of objects that wait for upload: enough to keep the upload busy with little memory."""
STOP_S: Final = 5.0
"""Seconds for the drawing thread to notice a stop. It checks after each tensor."""

NamedTensors = Iterable[tuple[str, Any]] | Mapping[str, Any]


class TensorFeed:
    """The tensors of one publication. `draw` runs on a thread; all other methods belong to the uploading event loop.

    Args:
        named_tensors: (name, tensor) pairs, drawn once.

    Attributes:
        given_bytes: bytes of torch or numpy tensors in a collection. 0 for an iterator.
        compare_s: seconds that the thread needed to read, compare, encode and hash tensors.

    Raises:
        InvalidRequest: `named_tensors` is not iterable.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        given: object = named_tensors
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            allowed = "an iterable of (name, tensor)"
            raise InvalidRequest(field="named_tensors", problem=f"is {describe(named_tensors)}", allowed=allowed)
        self._items: Iterable[object] = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        self.given_bytes = _bytes_of(self._items)
        self._room = threading.Semaphore(MAX_WAITING)
        self._has_begun = threading.Event()
        self._is_stopped = False
        self._failure: Exception | None = None
        # Set by `begin`.
        self._draft: Draft
        self._loop: asyncio.AbstractEventLoop
        self._objects: asyncio.Queue[StoredObject | None] = asyncio.Queue(MAX_WAITING + 2)
        self._ended = asyncio.Event()
        self._is_begun = False
        self.compare_s = 0.0

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<TensorFeed waiting={self._objects.qsize()} stopped={self._is_stopped}>"

    def begin(self, draft: Draft) -> None:
        """Start the pass over the tensors. The drawing thread waits for this call."""
        self._draft, self._loop, self._is_begun = draft, asyncio.get_running_loop(), True
        self._has_begun.set()

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects of the pass when they are complete.

        Raises:
            Exception: a tensor was rejected with it, or the iterator raised it.
        """
        while (stored := await self._objects.get()) is not None:
            self._room.release()
            yield stored
        if self._failure is not None:
            raise self._failure

    def halt(self) -> None:
        """End the pass after the present tensor. Any thread may call this, also more than once."""
        self._is_stopped = True
        self._has_begun.set()
        self._room.release()

    async def stop(self) -> bool:
        """End the pass and wait for the thread. Return False if it may still compare a tensor after `STOP_S`."""
        self.halt()
        if self._is_begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._ended.wait()
        return not self._is_begun or self._ended.is_set()

    def draw(self) -> None:
        """Draw all tensors. This blocks. `objects` raises the errors of this method."""
        self._has_begun.wait()
        if not self._is_begun:
            return
        with _EndHandover(self._end):
            for item in self._items:
                if self._is_stopped:
                    return
                if not isinstance(item, tuple | list) or len(item) != 2:
                    allowed = "pairs of a name and a tensor"
                    raise InvalidRequest(field="named_tensors", problem=f"has {describe(item)}", allowed=allowed)
                self._pass_on(self._draft.add(*item))
            self._pass_on(self._draft.finish())

    def _end(self, failure: Exception | None) -> None:
        self._failure = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._on_drawn)

    def _pass_on(self, found: Iterator[StoredObject]) -> None:
        started = time.perf_counter()
        for stored in found:
            self.compare_s += time.perf_counter() - started
            self._room.acquire()
            if self._is_stopped:
                return
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._objects.put_nowait, stored)
            started = time.perf_counter()
        self.compare_s += time.perf_counter() - started

    def _on_drawn(self) -> None:
        self._objects.put_nowait(None)
        self._ended.set()


def _bytes_of(items: Iterable[object]) -> int:
    """Return the bytes of tensors in memory. Items that are no (name, tensor) pair are rejected when they are drawn."""
    if not isinstance(items, Collection):
        return 0
    tensors = (item[1] for item in items if isinstance(item, tuple | list) and len(item) == 2)
    sizes = (getattr(tensor, "nbytes", 0) for tensor in tensors)
    return sum(size for size in sizes if isinstance(size, int))


class _EndHandover:
    """Reports the end of a block to another thread, which raises the error. Both threads raise an interrupt.

    Args:
        end: called with the error of the block, or None.
    """

    def __init__(self, end: Callable[[Exception | None], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        """Do nothing on entry."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report the error of the block. Suppress the error unless it is an interrupt."""
        if error is None or isinstance(error, Exception):
            self._end(error)
            return True
        self._end(BusClosed("the thread that draws the tensors was interrupted"))
        return False
